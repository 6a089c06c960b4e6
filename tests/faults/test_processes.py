"""Programs killed, stopped and ended under load: nothing accepted is lost, nothing has a second effect."""

import signal
import threading
from uuid import uuid4

import psutil

from config.local.processes import send_signal
from tests.faults.fault_injection import FAULTS
from tests.faults.fault_stack import SETTLED_WITHIN
from tests.faults.workers import worker
from tests.support.waiting import WAIT_LIMIT

HERD = 600  #: touches; six windows
CORE = "ticks,long,touch.high,touch.normal,touch.low"


def test_killed_programs_lose_nothing(fault_stack, under_load):
    with under_load(fault_stack, "kill -9 web, worker, beat") as run:
        for program in ("web", "worker", "beat"):
            run.await_random_point()
            FAULTS[f"kill -9 {program}"](run)
        run.send_load(20)


def test_killed_programs_during_herd_lose_nothing(fault_stack, under_load):
    """Far more touches than the window are due at one moment. The dispatch and a pool child are killed in between."""
    with under_load(fault_stack, "kill -9 during a herd") as run:
        fault_stack.make_herd(run.load.prefix, HERD)
        fault_stack.wait(lambda: run.delivered("load.week") > 0, "the herd is due")
        FAULTS["kill -9 ticks"](run)
        FAULTS["kill -9 pool child"](run)
        fault_stack.wait(lambda: run.delivered("load.week") == HERD, "the herd is delivered", SETTLED_WITHIN)


def test_worker_stopped_past_lease_writes_nothing(fault_stack, under_load):
    """Its sends are in flight as it stops. Another worker takes over what its leases let go; then it wakes up with
    answers about runs that are not its own any more."""
    target, receiver = fault_stack, fault_stack.receiver
    with (
        under_load(target, "SIGSTOP past the lease, SIGCONT") as run,
        worker(target.stack.environment, "-Q", CORE, "-c", "2", "-n", "second@%h", log="second") as second,
    ):
        second.await_ready()
        receiver.close()
        run.send_load(15)
        target.wait(lambda: receiver.held >= 10, "sends are in flight")
        stopped = target.family("core")
        run.inject_fault()
        try:
            for process in stopped:
                process.send_signal(signal.SIGSTOP)
            stopped_at = target.now()
            receiver.open()
            let_go = target.expire_leases(stopped_at)
            assert let_go
            target.wait(lambda: not _still_held(target, let_go), "the second worker takes over what was let go")
            settled = _settled(run)
        finally:
            for process in stopped:
                process.send_signal(signal.SIGCONT)
        target.wait(lambda: "stale_results_dropped" in target.stack.log("core"), "late results are dropped")
        run.send_load(20)
    after = _settled(run)
    assert {task_id: after[task_id] for task_id in settled} == settled


def _still_held(target, let_go):
    rows = target.sql(
        "SELECT task_id, lease_no FROM scheduling_touch WHERE task_id = ANY(%s)"
        " AND (state = 'running' OR state = 'scheduled' AND reason = 'worker_lost')",
        [list(let_go)],
    )
    return any(let_go[task_id] == lease_no for task_id, lease_no in rows)


def _settled(run):
    """Return the ended touches."""
    return {
        row["task_id"]: (row["state"], row["lease_no"], row["attempt"], row["settled_at"])
        for row in run.touches()
        if row["settled_at"]
    }


def test_worker_sigterm_settles_sends_in_flight(fault_stack, under_load):
    target, receiver = fault_stack, fault_stack.receiver
    with under_load(target, "SIGTERM with sends in flight") as run:
        receiver.close()
        run.send_load(15)
        target.wait(lambda: receiver.held >= 10, "sends are in flight")
        main = psutil.Process(target.stack.pids["core"])
        in_flight = {call.key for each in receiver.calls_of(run.load.prefix).values() for call in each}
        run.inject_fault()
        before = count_shutdowns(target)
        restart = threading.Thread(target=target.stack.restart, args=["core"])
        restart.start()
        try:
            target.wait(lambda: count_shutdowns(target) > before, "the worker has begun to end")
        finally:
            receiver.open()
        restart.join(WAIT_LIMIT)
        target.await_running("core", instead_of=main.pid)
        run.send_load(20)
    calls = receiver.calls_of(run.load.prefix)
    settled = dict(target.sql(_SETTLED_CALLS, [f"{run.load.prefix}%"]))
    assert [calls[key] for key in in_flight if len(calls[key]) > settled.get(key, 0)] == []


def count_shutdowns(target):
    return target.stack.log("core").lower().count("warm shutdown")


# A call is repeated after a result, too: 503, or its time limit on a machine that stalls.
_SETTLED_CALLS = """
SELECT t.root_id::text, count(*) FILTER (WHERE entry ->> 5 IS DISTINCT FROM 'worker_lost')
FROM scheduling_touch AS t JOIN scheduling_event AS e ON e.id = t.event_id, jsonb_array_elements(t.attempts) AS entry
WHERE e.event_id LIKE %s GROUP BY t.root_id
"""


def test_killed_passes_follow_each_touch_once(fault_stack):
    """The worker of the passes is killed twice while ends become events and plan the next touches."""
    target, prefix, herd = fault_stack, f"journey-{uuid4().hex[:8]}-", 60
    target.wait(lambda: target.sql("SELECT FROM scheduling_endmark WHERE reader = 'follow-ups'"), "ends are read")
    target.plan_herd(prefix, herd, "load.journey")
    for _ in range(2):
        processes = target.family("ticks")
        for process in processes:
            send_signal(process, signal.SIGKILL)  # a child may end with its parent
        target.await_running("ticks", instead_of=processes[0].pid)
        target.wait(lambda: _followed(target, prefix, "queued", "running", "delivered") > 0, "ends are followed")
    target.wait(lambda: _followed(target, prefix, "delivered") == herd, "all are followed", SETTLED_WITHIN)
    assert target.sql(
        "SELECT count(*), count(DISTINCT event_id) FROM scheduling_event WHERE user_id LIKE %s"
        " AND type = 'touch.delivered'",
        [f"{prefix}%"],
    ) == [(herd, herd)]  # fmt: skip


def _followed(target, prefix, *states):
    """Return the number of follow-ups in these states."""
    ((count,),) = target.sql(
        "SELECT count(*) FROM scheduling_touch AS t JOIN scheduling_event AS e ON e.id = t.event_id"
        " JOIN scheduling_node AS n ON n.id = t.node_id"
        " WHERE n.key = 'step-next' AND e.user_id LIKE %s AND t.state = ANY(%s)",
        [f"{prefix}%", list(states)],
    )
    return int(count)


def test_held_long_work_stops_no_pass(fault_stack):
    """Both processes of the worker for replays, bulk actions and imports are busy without end."""
    held = fault_stack.family("long")[1:]
    assert len(held) == 2
    prefix = f"{uuid4().hex[:8]}-"
    for process in held:
        process.suspend()
    try:
        fault_stack.make_herd(prefix, 20)  # a pass dispatches them
        fault_stack.wait(lambda: len(fault_stack.receiver.calls_of(prefix)) == 20, "the passes go on")
    finally:
        for process in held:
            process.resume()
