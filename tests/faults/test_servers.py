"""The servers killed, emptied and out of reach under load."""

import signal

from config.settings.connections import Timeouts
from tests.faults.fault_injection import FAULTS


def test_server_faults_lose_nothing(fault_stack, under_load):
    with under_load(fault_stack, "FLUSHALL, kill -9 PostgreSQL, kill -9 Valkey") as run:
        for blow in ("FLUSHALL", "kill -9 PostgreSQL", "kill -9 Valkey"):
            run.await_random_point()
            FAULTS[blow](run)
            run.send_load(20)


def test_events_are_accepted_while_broker_hangs(fault_stack, under_load):
    """A server that takes connections and never answers: worse than one that is gone."""
    with under_load(fault_stack, "broker hangs while events arrive") as run:
        run.await_random_point()
        run.inject_fault()
        fault_stack.stack.kill("Valkey", signal.SIGSTOP)
        try:
            before = len(run.load.accepted)
            run.send_load(60)
            median, worst = run.measure_answers(before)
        finally:
            fault_stack.stack.kill("Valkey", signal.SIGCONT)
        run.struck_at[-1] = fault_stack.now()  # recovery counts from its return
        run.send_load(20)
        run.notes.append(f"meanwhile 202 after {median * 1000:.0f} ms, at worst {worst:.2f} s")
    assert median < Timeouts().redis, "requests waited for the broker"
