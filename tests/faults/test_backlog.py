"""What the rescue and beat see of a backlog, on real brokers."""

import json
from datetime import UTC, datetime, timedelta
from urllib.parse import urlsplit
from uuid import uuid4

import amqp
import pytest
import redis
from django.utils.timezone import now
from kombu import Connection, Queue
from kombu.exceptions import OperationalError
from kombu.transport import memory

from config.celery.application import app
from config.celery.beat_scheduler import TickBacklog
from config.local.processes import wait_until
from scheduling import dispatch
from scheduling.dispatch import oldest_message_at, publication_headers
from scheduling.ledger.touches import AGE_UNKNOWN
from scheduling.models import Touch
from tests.support.waiting import WAIT_LIMIT


def test_oldest_message_at_returns_publication_time(valkey):
    """It prolongs the wake-ups behind it, so that a backlog is never amplified.

    The key of a queue has a prefix on Redis, and kombu's client prefixes only the commands that it knows.
    """
    queue = f"touch.{uuid4().hex[:8]}"
    assert oldest_message_at(queue) is None
    began = datetime.now(UTC)
    with app.connection_for_write() as own:  # the pool belongs to tests that close it, too
        app.send_task("scheduling.deliver", args=[[]], queue=queue, headers=publication_headers(), connection=own)
        app.send_task("scheduling.deliver", args=[[]], queue=queue, headers={"published_at": 0}, connection=own)
    oldest = oldest_message_at(queue)
    assert oldest is not None
    assert began - timedelta(seconds=3) < oldest < datetime.now(UTC) - timedelta(seconds=1)


def test_oldest_message_at_unreadable_item_is_none(valkey):
    valkey.lpush("mq:touch.high", "not a message")
    valkey.lpush("mq:touch.low", json.dumps([1]))
    assert oldest_message_at("touch.high") is None
    assert oldest_message_at("touch.low") is None


@pytest.fixture
def without_lindex(valkey, monkeypatch):
    """This process uses the broker as a user who may not read waiting messages."""
    valkey.acl_setuser("writer", enabled=True, nopass=True, keys=["*"], channels=["*"], commands=["+@all", "-lindex"])
    own = urlsplit(app.conf.broker_url)
    monkeypatch.setenv("CELERY_BROKER_URL", own._replace(netloc=f"writer:any@{own.hostname}:{own.port}").geturl())
    yield
    valkey.acl_deluser("writer")


def test_oldest_message_at_refused_by_redis_is_unreachable(without_lindex):
    with pytest.raises(OperationalError, match="permission"):
        oldest_message_at("touch.high")


def test_oldest_message_at_failed_broker_is_unreachable(valkey, monkeypatch):
    """The errors of amqp are no `OSError`. The memory transport names the same ones as the one for RabbitMQ."""
    for error in (redis.ConnectionError("reset"), redis.TimeoutError("stalled")):
        monkeypatch.setattr(redis.Redis, "lindex", fail_with(error))
        with pytest.raises(OperationalError, match=str(error)):
            oldest_message_at("touch.high")
    monkeypatch.setenv("CELERY_BROKER_URL", "memory://")
    monkeypatch.setattr(memory.Channel, "queue_declare", fail_with(amqp.ConnectionForced("shutdown")))
    with pytest.raises(OperationalError, match="shutdown"):
        oldest_message_at("touch.high")


def fail_with(error):
    def fail(*arguments, **more):
        raise error

    return fail


@pytest.mark.django_db(transaction=True)
def test_lost_runs_are_rescued_without_age_of_messages(matrix, record_event, without_lindex):
    """Their workers are dead, whatever waits in the queues."""
    matrix.node()
    run, wakeup = (record_event(user=user).task_ids[0] for user in ("ann", "bob"))
    ago = now() - timedelta(minutes=3)
    Touch.objects.update(wakeups=1, lease_no=1, due_at=ago, queued_at=ago, lease_until=ago)
    Touch.objects.filter(pk=run).update(state="running")
    Touch.objects.filter(pk=wakeup).update(state="queued")

    assert dispatch.rescue_lost_work() == (0, 1)
    assert _states() == {run: "scheduled", wakeup: "queued"}


@pytest.mark.django_db(transaction=True)
def test_lost_runs_are_rescued_before_wakeups(matrix, record_event, monkeypatch):
    """No error of the broker, of any kind, keeps them `running`."""
    matrix.node()
    (run,) = record_event().task_ids
    ago = now() - timedelta(minutes=3)
    Touch.objects.update(state="running", lease_no=1, lease_until=ago)
    monkeypatch.setattr(dispatch, "requeue_lost_wakeups", fail_with(RuntimeError("unforeseen")))

    with pytest.raises(RuntimeError):
        dispatch.rescue_lost_work()
    assert _states() == {run: "scheduled"}


def _states():
    return dict(Touch.objects.values_list("pk", "state"))


@pytest.fixture
def connected_rabbit(rabbit, monkeypatch):
    """A RabbitMQ that this process talks to."""
    monkeypatch.setenv("CELERY_BROKER_URL", rabbit.url)  # which Celery reads before its configuration
    monkeypatch.setitem(app.conf, "broker_transport_options", {"confirm_publish": True})
    return rabbit.url


@pytest.mark.django_db(transaction=True)
def test_rescue_does_not_wait_for_empty_rabbitmq_queue(matrix, record_event, connected_rabbit):
    """It shows no waiting message, only how many there are."""
    assert oldest_message_at("touch.normal") is None
    with Connection(connected_rabbit, transport_options={"confirm_publish": True}) as own:
        Queue("touch.normal", channel=own.default_channel).declare()
        assert oldest_message_at("touch.normal") is None
        own.Producer().publish([], exchange="", routing_key="touch.normal")
    assert oldest_message_at("touch.normal") == AGE_UNKNOWN

    matrix.node()
    record_event()
    for minutes, state in ((1, "queued"), (3, "scheduled")):
        ago = now() - timedelta(minutes=minutes)
        Touch.objects.update(state="queued", wakeups=1, due_at=ago, queued_at=ago, lease_until=ago)
        assert dispatch.rescue_lost_work() == (int(state == "scheduled"), 0)
        assert Touch.objects.get().state == state


def test_tick_backlog_on_rabbitmq_is_full_above_limit(rabbit, monkeypatch):
    monkeypatch.setattr(TickBacklog, "ASK_EVERY", -1.0)  # at each question
    with Connection(rabbit.url) as connection:
        producer, pile = connection.Producer(), TickBacklog("ticks")
        assert not pile.is_full(producer), "the queue is not there"

        queue = Queue("ticks")(connection.default_channel)
        queue.declare()
        for _ in range(TickBacklog.MOST):
            producer.publish("", routing_key="ticks")
        assert wait_until(lambda: int(queue.queue_declare(passive=True).message_count) == TickBacklog.MOST, WAIT_LIMIT)
        assert not pile.is_full(producer)

        producer.publish("", routing_key="ticks")
        assert wait_until(lambda: pile.is_full(producer), WAIT_LIMIT)
        queue.purge()
        assert not pile.is_full(producer)
        producer.publish("", routing_key="ticks")  # the channel that published is still open
