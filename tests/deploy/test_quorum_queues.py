"""RabbitMQ with quorum queues: everything is delivered, and due touches do not wait behind later ones."""

import pytest
from kombu import Connection

from scheduling.queue_names import CORE_QUEUES, RPA_QUEUES
from tests.faults.brokers import rabbitmq
from tests.support.small_matrix import LOG, LOOK, ONE_SHOP, small_matrix
from tests.support.stack import StackUnderTest, cloud_event, run_stack

WAITING = 40  #: touches that wait in the worker; two processes would have room for four by Celery's own count
NODES = (
    {"key": "later", "trigger": "order.paid", "delay": "25s"},
    {"key": "now", "trigger": "signup.succeeded"},
)


@pytest.mark.campaign
def test_quorum_queues_deliver_due_touches_before_waiting_ones(state_folder):
    own = {"platform": "pdd", "shop_id": "own", "name": "own", "dedicated_queue": True}
    folder = state_folder("quorum")
    with rabbitmq(folder) as broker:
        env = {
            "CELERY_BROKER_URL": broker.url, "AFTERTOUCH_RABBITMQ_QUORUM": "true", "AFTERTOUCH_RPA_SLOTS": "1",
        }  # fmt: skip
        with run_stack(folder / "stack", ["web", "core", "ticks", "execution", "beat"], env) as stack:
            target = StackUnderTest(stack)
            target.apply_config(small_matrix(LOG, *NODES, **{**ONE_SHOP, "shops": [*ONE_SHOP["shops"], own]}))
            target.create_api_key("events", "rpa")
            target.post_events(*(cloud_event(str(number), "order.paid", f"user-{number}") for number in range(WAITING)))
            target.wait(lambda: target.sql(HANDED_OVER) == [(WAITING,)], "the touches wait in the worker", pause=0.1)
            target.post_events(cloud_event(str(WAITING), "signup.succeeded", "ann"))
            for shop in ("s1", "own"):
                target.call("POST", "/api/v1/rpa/jobs", {**LOOK, "shop_id": shop})
            target.wait(lambda: target.sql(DELIVERED) == [(WAITING + 1,)], "all are delivered")
            assert target.sql(OVERTOOK) == [(True,)], "what was due at once came after what was not due yet"
            target.wait(lambda: target.sql(SUCCEEDED) == [(1,)], "the job of the shared queue succeeds")
            ((home,),) = target.sql("SELECT 'n.' || replace(name, '.', ':') || '.normal' FROM rpa_tasks_executionnode")
            assert "native delayed delivery" not in stack.log("core") + stack.log("beat") + stack.log("web")
        for queue in (*CORE_QUEUES, *RPA_QUEUES, home, "s.pdd.own"):
            assert _is_quorum(broker.url, queue), queue
        assert _message_count_after(broker.url, "task.pdd.own", "s.pdd.own") > 0


HANDED_OVER = "SELECT count(*) FROM scheduling_touch WHERE state = 'queued'"
DELIVERED = "SELECT count(*) FROM scheduling_touch WHERE state = 'delivered'"
SUCCEEDED = "SELECT count(*) FROM rpa_tasks_job WHERE state = 'succeeded'"
OVERTOOK = """
SELECT (SELECT max(settled_at) FROM scheduling_touch t JOIN scheduling_node n ON n.id = t.node_id WHERE n.key = 'now')
     < (SELECT min(settled_at) FROM scheduling_touch t JOIN scheduling_node n ON n.id = t.node_id WHERE n.key = 'later')
"""


def _message_count_after(url, routing_key, queue):
    """Publish to the topic exchange and return how many messages then wait in the queue, which has no consumer."""
    with Connection(url, transport_options={"confirm_publish": True}) as connection:
        connection.default_channel.queue_purge(queue)
        connection.Producer().publish({}, exchange="tasks", routing_key=routing_key)
        return int(connection.default_channel.queue_declare(queue, passive=True)[1])


def _is_quorum(url, queue):
    """A queue may be declared again only as what it is."""
    with Connection(url) as connection:
        try:
            connection.default_channel.queue_declare(
                queue, durable=True, auto_delete=False, arguments={"x-queue-type": "quorum"}
            )
        except connection.channel_errors:
            return False
    return True
