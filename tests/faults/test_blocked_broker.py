"""A broker that is up and takes no messages: RabbitMQ under an alarm of memory."""

import pytest
from kombu import Connection

from config.local.processes import wait_until
from scheduling.broker_health import accepts_messages, broker_alarm
from tests.faults.brokers import rabbitmq
from tests.faults.fault_stack import run_fault_stack
from tests.support.waiting import WAIT_LIMIT

SENDS = "Sending due task"  #: the message of beat


@pytest.mark.campaign
def test_blocked_rabbitmq_is_reported_and_events_accepted(state_folder, under_load):
    """Events are accepted during the block. Their touches go out afterwards without a restart."""
    folder = state_folder("blocked")
    with rabbitmq(folder) as node, run_fault_stack(folder / "stack", {"CELERY_BROKER_URL": node.url}) as made:
        pids = made.stack.pids
        with under_load(made, "RabbitMQ blocked by an alarm") as run:
            run.await_random_point()
            assert broker(made) == "ok"
            run.inject_fault()
            node.control("set_vm_memory_high_watermark", "0.000001")
            made.wait(lambda: broker(made) == "blocked", "the probe tells it")
            assert is_blocked(made)
            for program in ("web", "beat", "ticks"):
                made.wait(lambda program=program: "broker_blocked" in made.stack.log(program), f"{program} knows")
            before, sent = len(run.load.accepted), made.stack.log("beat").count(SENDS)
            run.send_load(20)
            _, slowest = run.measure_answers(before)
            made.wait(lambda: made.stack.log("beat").count(SENDS) > sent + 6, "beat goes on ticking")
            run.inject_fault()
            node.control("set_vm_memory_high_watermark", "0.4")
            run.send_load(15)
            run.notes.append(f"202 while it was blocked: at worst {slowest:.2f} s")
        assert broker(made) == "ok"
        assert not is_blocked(made)
        assert made.stack.pids == pids


def test_publisher_gives_up_on_alarm_and_recovers(rabbit):
    """Without any bound of its own; a bound of the broker's silence is far longer than a test may take."""
    assert is_published(rabbit.url)
    rabbit.control("set_vm_memory_high_watermark", "0.000001")
    assert wait_until(lambda: not is_published(rabbit.url), WAIT_LIMIT)
    assert broker_alarm.is_on()
    with open_connection(rabbit.url) as connection:
        assert accepts_messages(connection) is False
    with open_connection(rabbit.url) as connection:  # only Flower needs it
        connection.Producer().publish({}, exchange="celeryev", routing_key="worker.heartbeat")
    rabbit.control("set_vm_memory_high_watermark", "0.4")
    assert wait_until(lambda: not broker_alarm.is_on(), WAIT_LIMIT)
    assert is_published(rabbit.url)
    with open_connection(rabbit.url) as connection:
        assert accepts_messages(connection) is True


def open_connection(url):
    return Connection(url, transport_options={"confirm_publish": True})


def is_published(url):
    try:
        with open_connection(url) as connection:
            connection.Producer().publish({}, exchange="", routing_key="nobody")
    except ConnectionError:
        return False
    return True


def broker(made):
    return str(made.call("GET", "/health/ready")["broker"]["status"])


def is_blocked(made):
    return "\naftertouch_broker_blocked 1.0\n" in made.ask("GET", "/metrics").text
