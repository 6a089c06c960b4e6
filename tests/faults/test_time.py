"""A wait of days through a restart of everything."""

from uuid import uuid4

from config.local import servers
from tests.support.stack import cloud_event


def test_seven_day_touch_survives_restarts(fault_stack, report_line):
    """The clock is moved by moving the touch's times; a moved clock would move the leases of all others as well."""
    target, user = fault_stack, f"ann-{uuid4().hex[:8]}"

    def read(column):
        ((value,),) = target.sql(
            f"SELECT t.{column} FROM scheduling_touch AS t JOIN scheduling_event AS e ON e.id = t.event_id"
            " WHERE e.event_id = %s",
            [user],
        )
        return value

    target.post_events(cloud_event(user, "load.week", user))
    _move_due_time(target, user, "6 days")
    _restart_everything(target)
    assert not target.receiver.calls_of(user)
    assert read("state") == "scheduled"
    _move_due_time(target, user, "1 day -6 seconds")
    target.wait(lambda: bool(target.receiver.calls_of(user)), "it is delivered")
    target.wait(lambda: read("state") == "delivered", "it is settled")
    (calls,) = target.receiver.calls_of(user).values()
    assert len(calls) == 1
    late = calls[0].at - read("planned_at").timestamp()
    assert late >= 0
    report_line(f"7 days through a restart of everything · delivered once, {late:.1f} s late")


def _move_due_time(target, event_id, days):
    target.sql(
        "UPDATE scheduling_touch AS t SET due_at = due_at - %(by)s::interval,"
        " planned_at = planned_at - %(by)s::interval, expires_at = expires_at - %(by)s::interval"
        " FROM scheduling_event AS e WHERE e.id = t.event_id AND e.event_id = %(event)s",
        {"by": days, "event": event_id},
    )


def _restart_everything(target):
    stack, before = target.stack, target.stack.server_pids
    for server in before:
        stack.kill(server)
    target.wait(
        lambda: all(stack.server_pids.get(server, pid) != pid for server, pid in before.items()), "the servers are back"
    )
    servers.start_servers(stack.state_dir)  # proves that they answer
    for program in ("core", "ticks", "beat", "web"):
        stack.restart(program)
