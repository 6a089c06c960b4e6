"""A worker killed after it reserved slots of a quota, and before it committed what it did with them."""

import psycopg
from redis import Redis

from tests.faults.fault_injection import living_children
from tests.faults.fault_stack import DAILY_LIMIT, SETTLED_WITHIN

HERD = 25
QUARTER = 900_000_000  #: µs


def count_fields(server, pattern, name=""):
    """Return the sum of the fields of these hashes whose names start with `name`."""
    hashes = [server.hgetall(key) for key in server.scan_iter(pattern)]
    return sum(int(count) for each in hashes for field, count in each.items() if field.startswith(name))


def test_killed_worker_loses_only_reserved_slots(fault_stack, under_load):
    """Its touches go by slots of another reservation. Those of the dead are free again after their quarter."""
    target = fault_stack
    with (
        under_load(target, "kill -9 between reservation and commit") as run,
        Redis.from_url(target.stack.endpoints.redis_url, decode_responses=True) as server,
    ):
        first, second = f"{run.load.prefix}first-", f"{run.load.prefix}second-"
        target.plan_herd(first, HERD, "load.limited")
        with psycopg.connect(target.stack.endpoints.database_url) as holder:
            holder.execute("SELECT FROM scheduling_customer WHERE user_id LIKE %s FOR UPDATE", [f"{first}%"])
            assert target.make_due(first) == HERD
            target.wait(lambda: count_fields(server, "at:quota:*:ahead:1") >= HERD, "slots are reserved")
            killed = living_children(target.family("core")[0])
            run.inject_fault()
            for child in killed:
                child.kill()
            target.await_gone(killed)
            assert run.delivered("load.limited") == 0
            holder.rollback()
        target.expire_leases(target.now())
        target.wait(lambda: run.delivered("load.limited") == HERD, "all are delivered", SETTLED_WITHIN)
        assert count_fields(server, "at:quota:*:used", "day") == HERD, "a touch took one slot of the day"

        (ahead,) = server.scan_iter("at:quota:*:ahead:1")
        counts = server.hgetall(ahead)
        assert sum(map(int, counts.values())) >= 2 * HERD
        server.delete(ahead)
        server.hset(ahead, mapping={str(int(part) - QUARTER): count for part, count in counts.items()})
        rest = DAILY_LIMIT - HERD
        target.plan_herd(second, rest, "load.limited")
        assert target.make_due(second) == rest
        target.wait(lambda: run.delivered("load.limited") == DAILY_LIMIT, "the day is used up", SETTLED_WITHIN)
