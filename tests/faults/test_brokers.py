"""Other brokers under load: a Sentinel fail-over, and RabbitMQ killed and started again."""

import re

import pytest

from config.settings.connections import Timeouts
from tests.faults.brokers import rabbitmq, sentinels
from tests.faults.fault_stack import run_fault_stack
from tests.faults.workers import worker

CORE = "ticks,long,touch.high,touch.normal,touch.low"
DELIVERED = "Task scheduling.deliver["
BATCHES = 40  #: of both together, before their shares are looked at
SHARE = 0.2  #: of each at least; what the first took before the second was there is its own for some seconds


def node(made, folder):
    servers = made.stack.endpoints
    environment = {
        **made.stack.environment, "AFTERTOUCH_STATE_DIR": str(folder),
        "DATABASE_URL": servers.database_url, "REDIS_URL": servers.redis_url,
    }  # fmt: skip
    return worker(environment, "-Q", CORE, "-c", "2", "-n", f"{folder.name}@%h")


def batches(log):
    """Return touches that ended here. A received message may still go to another worker."""
    return len(re.findall(rf"{re.escape(DELIVERED)}[0-9a-f-]+\] succeeded", log))


def test_sentinel_failover_loses_nothing(state_folder, under_load):
    folder = state_folder("sentinel")
    with (
        sentinels(folder) as watched,
        run_fault_stack(folder / "stack", {"CELERY_BROKER_URL": watched.broker_url}) as made,
    ):
        with under_load(made, "Sentinel fail-over") as run:
            run.await_random_point()
            worker = made.stack.pids["core"]
            run.inject_fault()
            killed = watched.kill_primary()
            made.wait(lambda: watched.primary_port() not in (0, killed.port), "another primary is named")
            run.notes.append(f"new primary after {(made.now() - run.struck_at[-1]).total_seconds():.1f} s")
            run.send_load(20)
        assert made.stack.pids["core"] == worker


@pytest.mark.campaign
def test_failover_with_node_killed_and_joined_loses_nothing(state_folder, under_load):
    """Each node has a state folder of its own; all they share is the database and the broker."""
    folder = state_folder("nodes")
    with (
        sentinels(folder) as watched,
        run_fault_stack(folder / "stack", {"CELERY_BROKER_URL": watched.broker_url}) as made,
        under_load(made, "one of two nodes killed, a third joins, Sentinel fail-over") as run,
        node(made, state_folder("second")) as second,
    ):
        second.await_ready()
        before_second = batches(made.stack.log("core"))
        shares = [0, 0]

        def both_have_their_share():
            shares[:] = batches(made.stack.log("core")) - before_second, batches(second.log)
            return sum(shares) >= BATCHES and min(shares) >= SHARE * sum(shares)

        made.wait(both_have_their_share, f"each of two nodes has {SHARE:.0%} of at least {BATCHES} batches")
        run.inject_fault()
        second.kill()
        run.send_load(10)
        with node(made, state_folder("third")) as third:
            third.await_ready()
            run.inject_fault()
            killed = watched.kill_primary()
            made.wait(lambda: watched.primary_port() not in (0, killed.port), "another primary is named")
            made.wait(lambda: batches(third.log) > 0, "the third node has its share")
        run.notes.append(f"batches of the two nodes: {shares[0]} and {shares[1]}")


def test_rabbitmq_restart_loses_nothing(state_folder, under_load):
    """Events are accepted during the outage; their touches are delivered after it."""
    folder = state_folder("rabbitmq")
    with rabbitmq(folder) as node, run_fault_stack(folder / "stack", {"CELERY_BROKER_URL": node.url}) as made:
        with under_load(made, "RabbitMQ killed, away, started") as run:
            run.await_random_point()
            worker = made.stack.pids["core"]
            node.kill()
            before = len(run.load.accepted)
            run.send_load(20)
            median, slowest = run.measure_answers(before)
            run.inject_fault()
            node.start()
            run.send_load(15)
            run.notes.append(f"202 while it was away: after {median * 1000:.0f} ms, at worst {slowest:.2f} s")
        assert made.stack.pids["core"] == worker
    assert median < Timeouts().broker_producer, "requests waited for the broker"
