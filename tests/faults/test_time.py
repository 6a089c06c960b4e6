"""Standby beats, and a wait of days through a restart of everything."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from uuid import uuid4

from config.celery.beat_scheduler import LEADER_LOCK
from config.local import servers
from tests.faults.fault_stack import FaultStack
from tests.faults.workers import Program, celery
from tests.support.stack import cloud_event


@contextmanager
def without_beat(target: FaultStack) -> Iterator[None]:
    target.await_running("beat")
    target.stack.stop("beat")
    try:
        yield
    finally:
        target.stack.start("beat")


def leaders(target: FaultStack) -> int:
    return int(
        target.sql(
            "SELECT count(*) FROM pg_locks WHERE locktype = 'advisory' AND granted"
            " AND (classid::bigint << 32) | objid::bigint = %s",
            [LEADER_LOCK],
        )[0][0]
    )


def sent(beat: Program) -> int:
    """How many messages it sent."""
    return beat.log.count("Sending due task")


def leads(beat: Program) -> bool:
    return "beat_leads" in beat.log


def test_standby_beat_takes_over_after_kill(fault_stack: FaultStack, report_line: object) -> None:
    target, environment = fault_stack, fault_stack.stack.environment
    with (
        without_beat(target),
        celery(environment, "beat", "-l", "INFO", log="beat-a") as first,
        celery(environment, "beat", "-l", "INFO", log="beat-b") as second,
    ):
        target.wait(lambda: leads(first) or leads(second), "one of them leads")
        leader, standby = (first, second) if leads(first) else (second, first)
        target.wait(lambda: sent(leader) >= 3, "it ticks")
        assert not sent(standby)
        assert not leads(standby)
        assert leaders(target) == 1
        killed_at = target.now()
        leader.kill()
        # No tighter bound: how fast it takes over is measured, and a loaded machine is no fault of it.
        target.wait(lambda: leads(standby), "the other one takes over")
        took = (target.now() - killed_at).total_seconds()
        report_line(f"kill -9 of the leading beat · the other one leads after {took:.1f} s")  # type: ignore[operator]
        target.wait(lambda: sent(standby) > 0, "it ticks")


def test_seven_day_touch_survives_restarts(fault_stack: FaultStack, report_line: object) -> None:
    """The clock is moved by moving the touch's times; a moved clock would move the leases of all others as well."""
    target, user = fault_stack, f"ann-{uuid4().hex[:8]}"
    target.post_events(cloud_event(user, "load.week", user))
    _move_due_time(target, user, "6 days")
    _restart_everything(target)
    assert not target.receiver.calls_of(user)
    assert target.sql("SELECT state FROM scheduling_touch AS t JOIN scheduling_event AS e ON e.id = t.event_id"
                     " WHERE e.event_id = %s", [user]) == [("scheduled",)]  # fmt: skip
    _move_due_time(target, user, "1 day -6 seconds")
    target.wait(lambda: bool(target.receiver.calls_of(user)), "it is delivered")
    target.wait(
        lambda: target.sql(
            "SELECT t.state FROM scheduling_touch AS t JOIN scheduling_event AS e ON e.id = t.event_id"
            " WHERE e.event_id = %s", [user]
        ) == [("delivered",)],
        "it is settled",
    )  # fmt: skip
    (calls,) = target.receiver.calls_of(user).values()
    due_at = target.sql(
        "SELECT planned_at FROM scheduling_touch AS t JOIN scheduling_event AS e ON e.id = t.event_id"
        " WHERE e.event_id = %s", [user]
    )[0][0]  # fmt: skip
    assert len(calls) == 1
    assert calls[0].at >= due_at.timestamp()
    late = calls[0].at - due_at.timestamp()
    report_line(f"7 days through a restart of everything · delivered once, {late:.1f} s late")  # type: ignore[operator]


def _move_due_time(target: FaultStack, event_id: str, days: str) -> None:
    target.sql(
        "UPDATE scheduling_touch AS t SET due_at = due_at - %(by)s::interval,"
        " planned_at = planned_at - %(by)s::interval, expires_at = expires_at - %(by)s::interval"
        " FROM scheduling_event AS e WHERE e.id = t.event_id AND e.event_id = %(event)s",
        {"by": days, "event": event_id},
    )


def _restart_everything(target: FaultStack) -> None:
    stack, before = target.stack, target.stack.server_pids
    for server in before:
        stack.kill(server)
    target.wait(
        lambda: all(stack.server_pids.get(server, pid) != pid for server, pid in before.items()), "the servers are back"
    )
    servers.start_servers(stack.state_dir)  # proves that they answer
    for program in ("core", "ticks", "beat", "web"):
        stack.restart(program)
