"""A worker whose pool grows and shrinks, under load and with its children killed."""

import time
from contextlib import ExitStack

import psutil
import psycopg
import pytest

from scheduling.queue_names import CORE_QUEUES
from tests.faults.brokers import rabbitmq, redis_server
from tests.faults.fault_injection import living_children
from tests.faults.fault_stack import run_fault_stack
from tests.faults.test_celery_guards import envelope, push
from tests.faults.workers import worker

BOUNDS = {"AFTERTOUCH_WORKER_MIN": "1", "AFTERTOUCH_WORKER_MAX": "4", "AFTERTOUCH_WORKER_SHRINK_AFTER": "PT1S"}
#: The rows that a batch locks before it judges. New customers do not wait for it, so events are accepted.
HELD = "SELECT FROM scheduling_customer WHERE user_id LIKE 'ann-%' FOR NO KEY UPDATE"


def test_pool_grows_with_backlog_and_shrinks_after(fault_stack, state_folder, tmp_path):
    gate, marks = tmp_path / "gate", [str(number) for number in range(8)]
    with redis_server(state_folder("elastic")) as broker:
        environment = {**fault_stack.stack.environment, **BOUNDS, "CELERY_BROKER_URL": broker.url}
        with worker(environment, "-Q", ",".join(CORE_QUEUES), "-c", "2", app="tests.faults.misbehaving_app") as program:
            program.await_ready()
            main = psutil.Process(program.pid)
            for mark in marks:
                push(broker, "touch.normal", envelope("bad.wait", str(gate), mark, published_at=time.time()))
            fault_stack.wait(lambda: len(living_children(main)) == 4, "it grows to its most")
            gate.touch()
            fault_stack.wait(lambda: len(gate.read_text().split()) >= len(marks), "all have run")
            fault_stack.wait(lambda: len(living_children(main)) == 1, "it shrinks to its least")
            assert sorted(gate.read_text().split()) == marks


@pytest.mark.campaign
@pytest.mark.parametrize(
    "kind",
    ["Redis", "RabbitMQ"],
)
def test_elastic_pool_child_killed_is_replaced(kind, state_folder, under_load):
    folder = state_folder(f"elastic-{kind}")
    with ExitStack() as running:
        url = {"CELERY_BROKER_URL": running.enter_context(rabbitmq(folder)).url} if kind == "RabbitMQ" else {}
        made = running.enter_context(run_fault_stack(folder / "stack", {**BOUNDS, **url}))
        main = psutil.Process(made.stack.pids["core"])
        with under_load(made, f"pool grows and shrinks on {kind}", rate=3.0) as run:
            run.send_load(10)
            with psycopg.connect(made.stack.endpoints.database_url) as database:
                database.execute(HELD)
                made.wait(lambda: len(living_children(main)) == 4, "it grows to its most")
                victim = run.chance.choice(living_children(main))
                run.inject_fault()
                victim.kill()
                made.await_gone([victim])
                made.wait(lambda: len(living_children(main)) == 4, "the child is replaced")
                made.expire_leases(run.struck_at[-1])
            run.send_load(10)
            made.wait(lambda: "pool_shrinks" in made.stack.log("core"), "it shrinks under load")
        made.wait(lambda: len(living_children(main)) == 1, "it shrinks to its least")
        assert made.stack.pids["core"] == main.pid
        assert sizes(made)[0] > 1
        assert sizes(made)[-1] == 1


def sizes(made):
    """Return the pool sizes after each change, from the log."""
    lines = [line for line in made.stack.log("core").splitlines() if "pool_grows" in line or "pool_shrinks" in line]
    return [int("".join(each for each in line.partition("processes")[2][:6] if each.isdigit())) for line in lines]
