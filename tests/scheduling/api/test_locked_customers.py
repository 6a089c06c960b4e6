"""A customer whom another transaction holds is answered soon with 503, and holds up no other customer's request."""

import asyncio
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import psycopg
import pytest

from scheduling.models import Customer, Event
from scheduling.planning.ingest import (
    SHORT_LOCK_WAIT,
    CustomerLocked,
    GroupCommit,
    NewEvent,
    record_and_publish,
)
from tests.scheduling.api.serving import cloud_event, database_url
from tests.support.waiting import WAIT_LIMIT, eventually

pytestmark = [pytest.mark.django_db(transaction=True), pytest.mark.processes]

HELD = "SELECT id FROM scheduling_customer WHERE user_id = %s FOR UPDATE"


@pytest.fixture
def ann_is_held(transactional_db, settings):
    """Another transaction holds Ann's row until the test ends or rolls it back."""
    settings.TIMEOUTS = replace(settings.TIMEOUTS, event_lock=1.0)
    Customer.objects.create(user_id="ann")
    with psycopg.connect(database_url()) as holder:
        holder.execute(HELD, ["ann"])
        yield holder
        holder.rollback()


def test_locked_customer_does_not_block_others(api, ann_is_held):
    batch = api.event(cloud_event("b1", subject="bob"), cloud_event("b2"))
    assert (batch.status_code, Event.objects.exists()) == (503, False)
    others = [cloud_event(f"o{number}", subject=f"user-{number}") for number in range(20)]
    with ThreadPoolExecutor(40) as pool:
        locked = [pool.submit(api.event, cloud_event(f"a{number}")) for number in range(3)]
        answers = list(pool.map(api.event, others))
        refused = [each.result() for each in locked]

    assert [answer.status_code for answer in answers] == [202] * 20
    assert [answer.status_code for answer in refused] == [503] * 3
    assert all(answer.headers["Content-Type"] == "application/problem+json" for answer in refused)
    assert all(int(answer.headers["Retry-After"]) >= 1 for answer in refused)
    assert all("customer" in answer.json()["detail"] for answer in refused)
    assert Event.objects.count() == 20

    ann_is_held.rollback()
    for number in range(3):
        eventually(lambda number=number: api.event(cloud_event(f"a{number}")).status_code == 202)
    assert Event.objects.count() == 23


def test_recently_locked_customer_waits_apart(ann_is_held, settings, monkeypatch):
    """One lock must not cost each following group the whole wait."""
    monkeypatch.setattr("scheduling.planning.ingest.REMEMBER_LOCKED", WAIT_LIMIT)
    waits = []

    def record(events, lock_wait):
        waits.append(({event.user_id for event in events}, lock_wait))
        return record_and_publish(events, lock_wait)

    def event(user, number):
        return [NewEvent("shop", f"{user}-{number}", "material.downloaded", user)]

    async def story():
        with pytest.raises(CustomerLocked):
            await group_commit.submit(event("ann", 0))
        for number in range(1, 4):
            both = [group_commit.submit(event(user, number)) for user in ("ann", "bob")]
            ann, bob = await asyncio.gather(*both, return_exceptions=True)
            assert isinstance(ann, CustomerLocked)
            assert len(bob) == 1

    monkeypatch.setattr("scheduling.planning.ingest.record_and_publish", record)
    group_commit = GroupCommit()
    try:
        asyncio.run(asyncio.wait_for(story(), WAIT_LIMIT))
    finally:
        group_commit.close()
    assert waits[0] == ({"ann"}, settings.TIMEOUTS.event_lock)
    assert {wait for users, wait in waits[1:] if "ann" in users} == {SHORT_LOCK_WAIT}
    assert all(len(users) == 1 for users, _ in waits)


def test_uncommitted_customer_blocks_only_itself(api, transactional_db):
    """Its row cannot be seen, so the batch is halved."""
    with psycopg.connect(database_url()) as holder:
        holder.execute(
            "INSERT INTO scheduling_customer (user_id, name, level, locale, timezone, addresses, opted_out, created_at)"
            " VALUES ('ann', '', '', '', '', '{}', false, now())"
        )
        with ThreadPoolExecutor(20) as pool:
            locked = pool.submit(api.event, cloud_event("a1"))
            answers = list(pool.map(api.event, [cloud_event(f"o{n}", subject=f"user-{n}") for n in range(10)]))
            assert locked.result().status_code == 503
        assert [answer.status_code for answer in answers] == [202] * 10
        holder.rollback()
    assert api.event(cloud_event("a1")).status_code == 202


def test_put_of_locked_customer_returns_503(api, ann_is_held):
    answer = api("PUT", "/customers/ann", {"level": "vip"})
    assert (answer.status_code, answer.headers["Content-Type"]) == (503, "application/problem+json")
    assert int(answer.headers["Retry-After"]) >= 1
    assert api("PUT", "/customers/bob", {"level": "vip"}).status_code == 200

    ann_is_held.rollback()
    assert api("PUT", "/customers/ann", {"level": "vip"}).json()["level"] == "vip"
