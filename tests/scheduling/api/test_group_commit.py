"""The writer thread: events that arrive during a commit share the next transaction; no request fails because of
another.
"""

import asyncio
import threading

import pytest
from django.db import OperationalError

from scheduling.errors import InvalidInput
from scheduling.ids import new_id
from scheduling.planning import ingest
from scheduling.planning.ingest import DatabaseUnavailable, GroupCommit, IngestOverloaded, NewEvent, Receipt
from tests.support.waiting import WAIT_LIMIT


class Book:
    """Replace the database: record each transaction, and wait or fail on request."""

    def __init__(self):
        self.transactions = []
        self.may_commit = threading.Event()
        self.may_commit.set()
        self.entered = threading.Event()
        self.fail = lambda ids: None

    def record(self, events, lock_wait):
        ids = [event.event_id for event in events]
        self.entered.set()
        assert self.may_commit.wait(WAIT_LIMIT)
        self.fail(ids)
        self.transactions.append(ids)
        return [Receipt(new_id(), False) for _ in events]


@pytest.fixture
def recorded_transactions():
    return Book()


@pytest.fixture
def group_commit(recorded_transactions, db, monkeypatch):
    monkeypatch.setattr(ingest, "record_and_publish", recorded_transactions.record)
    monkeypatch.setattr(ingest, "WAITING_LIMIT", 1000)
    group_commit = GroupCommit()
    yield group_commit
    recorded_transactions.may_commit.set()
    group_commit.close()


def events(*ids):
    return [NewEvent("shop", id, "x", "ann") for id in ids]


def run(story):
    async def bounded():
        async with asyncio.timeout(WAIT_LIMIT):
            return await story()

    return asyncio.run(bounded())


async def submit_during_commit(recorded_transactions, group_commit, ids):
    """Hand these in while the writer is busy with another; returns what each was answered."""
    recorded_transactions.may_commit.clear()
    first = group_commit.submit(events("first"))
    await asyncio.to_thread(recorded_transactions.entered.wait, WAIT_LIMIT)
    handed_in = [group_commit.submit(events(id)) for id in ids]
    recorded_transactions.may_commit.set()
    await first
    return await asyncio.gather(*handed_in, return_exceptions=True)


def test_events_during_a_commit_are_grouped_by_500(recorded_transactions, group_commit):
    ids = [f"e{number}" for number in range(700)]
    answers = run(lambda: submit_during_commit(recorded_transactions, group_commit, ids))
    assert recorded_transactions.transactions == [["first"], ids[:500], ids[500:]]
    assert all(len(answer) == 1 for answer in answers)


def test_group_never_splits_a_request(recorded_transactions, group_commit):
    async def story():
        recorded_transactions.may_commit.clear()
        requests = [group_commit.submit(events(*(f"{at}-{n}" for n in range(300)))) for at in range(3)]
        recorded_transactions.may_commit.set()
        assert [len(await request) for request in requests] == [300, 300, 300]

    run(story)
    assert {len(each) for each in recorded_transactions.transactions} == {300}


def test_group_with_bad_event_refuses_only_that(recorded_transactions, group_commit):
    def fail(ids):
        if "bad" in ids:
            raise InvalidInput.of("type", "no")

    recorded_transactions.fail = fail
    answers = run(lambda: submit_during_commit(recorded_transactions, group_commit, ["a", "b", "bad", "c", "d"]))

    assert [isinstance(answer, InvalidInput) for answer in answers] == [False, False, True, False, False]
    assert sorted(id for each in recorded_transactions.transactions for id in each) == ["a", "b", "c", "d", "first"]


def test_database_outage_fails_waiting_requests_at_once(recorded_transactions, group_commit):
    tried = []

    def fail(ids):
        tried.append(ids)
        raise OperationalError("gone")

    async def story():
        recorded_transactions.may_commit.clear()
        handed_in = [group_commit.submit(events(f"e{number}")) for number in range(20)]
        await asyncio.to_thread(recorded_transactions.entered.wait, WAIT_LIMIT)
        recorded_transactions.fail = fail
        recorded_transactions.may_commit.set()
        answers = await asyncio.gather(*handed_in, return_exceptions=True)
        assert all(isinstance(answer, DatabaseUnavailable) for answer in answers)
        assert len(tried) == 2  # the first group twice, the rest never

    run(story)
    assert recorded_transactions.transactions == []


def test_overload_is_refused_at_once(recorded_transactions, group_commit):
    async def story():
        recorded_transactions.may_commit.clear()
        waiting = [group_commit.submit(events("first"))]
        await asyncio.to_thread(recorded_transactions.entered.wait, WAIT_LIMIT)
        waiting += [group_commit.submit(events(*(str(number) for number in range(500)))) for _ in range(2)]
        with pytest.raises(IngestOverloaded):
            group_commit.submit(events("one too many"))
        recorded_transactions.may_commit.set()
        await asyncio.gather(*waiting)
        assert len(await group_commit.submit(events("after"))) == 1

    run(story)


def test_cancelled_waiter_does_not_affect_others(recorded_transactions, group_commit):
    async def story():
        recorded_transactions.may_commit.clear()
        impatient, patient = group_commit.submit(events("e1")), group_commit.submit(events("e2"))
        asyncio.ensure_future(impatient).cancel()
        recorded_transactions.may_commit.set()
        assert len(await patient) == 1

    run(story)
    assert sorted(id for each in recorded_transactions.transactions for id in each) == ["e1", "e2"]


def test_close_stores_waiting_events(recorded_transactions, group_commit):
    async def story():
        handed_in = [group_commit.submit(events(f"e{number}")) for number in range(5)]
        await asyncio.to_thread(group_commit.close)
        assert [len(each) for each in await asyncio.gather(*handed_in)] == [1] * 5

    run(story)
