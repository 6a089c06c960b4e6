"""The writer thread: what gathers while it commits goes into the next transaction, and nobody pays for another."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
from django.db import OperationalError

from scheduling.errors import InvalidInput
from scheduling.ids import new_id
from scheduling.planning.group_commit import DatabaseUnavailable, GroupCommit, IngestOverloaded
from scheduling.planning.ingest import NewEvent, Receipt
from tests.scheduling.api.serving import PATIENCE


class Book:
    """Stands in for the database: remembers each transaction, and waits or fails when told."""

    def __init__(self) -> None:
        self.transactions: list[list[str]] = []
        self.may_commit = threading.Event()
        self.may_commit.set()
        self.entered = threading.Event()
        self.fail: Callable[[list[str]], None] = lambda ids: None

    def record(self, events: Sequence[NewEvent], lock_wait: float) -> list[Receipt]:
        ids = [event.event_id for event in events]
        self.entered.set()
        assert self.may_commit.wait(PATIENCE)
        self.fail(ids)
        self.transactions.append(ids)
        return [Receipt(new_id(), False) for _ in events]


@pytest.fixture
def book() -> Book:
    return Book()


@pytest.fixture
def group_commit(book: Book, db: None) -> Iterator[GroupCommit]:
    group_commit = GroupCommit(book.record, waiting_limit=1000)
    yield group_commit
    book.may_commit.set()
    group_commit.close()


def events(*ids: str) -> list[NewEvent]:
    return [NewEvent("shop", id, "x", "ann") for id in ids]


def run(story: Callable[[], Any]) -> Any:
    async def bounded() -> Any:
        async with asyncio.timeout(PATIENCE):
            return await story()

    return asyncio.run(bounded())


async def meanwhile(book: Book, group_commit: GroupCommit, ids: Sequence[str]) -> list[Any]:
    """Hand these in while the writer is busy with another; returns what each was answered."""
    book.may_commit.clear()
    first = group_commit.submit(events("first"))
    await asyncio.to_thread(book.entered.wait, PATIENCE)
    handed_in = [group_commit.submit(events(id)) for id in ids]
    book.may_commit.set()
    await first
    return await asyncio.gather(*handed_in, return_exceptions=True)


def test_what_comes_during_a_commit_is_committed_together(book: Book, group_commit: GroupCommit) -> None:
    ids = [f"e{number}" for number in range(40)]
    answers = run(lambda: meanwhile(book, group_commit, ids))
    assert book.transactions == [["first"], ids]
    assert all(len(answer) == 1 for answer in answers)


def test_a_lone_event_waits_for_nobody(book: Book, group_commit: GroupCommit) -> None:
    async def story() -> None:
        assert len(await group_commit.submit(events("e1"))) == 1

    run(story)
    assert book.transactions == [["e1"]]


def test_no_transaction_has_more_than_five_hundred(book: Book, group_commit: GroupCommit) -> None:
    run(lambda: meanwhile(book, group_commit, [f"e{number}" for number in range(700)]))
    assert [len(each) for each in book.transactions] == [1, 500, 200]


def test_a_request_is_never_torn_apart(book: Book, group_commit: GroupCommit) -> None:
    async def story() -> None:
        book.may_commit.clear()
        requests = [group_commit.submit(events(*(f"{at}-{n}" for n in range(300)))) for at in range(3)]
        book.may_commit.set()
        assert [len(await request) for request in requests] == [300, 300, 300]

    run(story)
    assert {len(each) for each in book.transactions} == {300}


def test_one_that_cannot_be_stored_fails_alone(book: Book, group_commit: GroupCommit) -> None:
    def fail(ids: list[str]) -> None:
        if "bad" in ids:
            raise InvalidInput.of("type", "no")

    book.fail = fail
    answers = run(lambda: meanwhile(book, group_commit, ["a", "b", "bad", "c", "d"]))

    assert [isinstance(answer, InvalidInput) for answer in answers] == [False, False, True, False, False]
    assert sorted(id for each in book.transactions for id in each) == ["a", "b", "c", "d", "first"]


def test_a_lost_connection_is_tried_once_more(book: Book, group_commit: GroupCommit) -> None:
    lost = iter([OperationalError("gone")])

    def fail(ids: list[str]) -> None:
        if error := next(lost, None):
            raise error

    book.fail = fail

    async def story() -> None:
        assert len(await group_commit.submit(events("e1"))) == 1

    run(story)
    assert book.transactions == [["e1"]]


def test_without_a_database_everybody_who_waits_is_told_at_once(book: Book, group_commit: GroupCommit) -> None:
    tried: list[list[str]] = []

    def fail(ids: list[str]) -> None:
        tried.append(ids)
        raise OperationalError("gone")

    async def story() -> None:
        book.may_commit.clear()
        handed_in = [group_commit.submit(events(f"e{number}")) for number in range(20)]
        await asyncio.to_thread(book.entered.wait, PATIENCE)
        book.fail = fail
        book.may_commit.set()
        answers = await asyncio.gather(*handed_in, return_exceptions=True)
        assert all(isinstance(answer, DatabaseUnavailable) for answer in answers)
        assert len(tried) == 2  # the first group twice, the rest never

    run(story)
    assert book.transactions == []


def test_more_than_can_be_stored_soon_is_refused_at_once(book: Book, group_commit: GroupCommit) -> None:
    async def story() -> None:
        book.may_commit.clear()
        waiting = [group_commit.submit(events("first"))]
        await asyncio.to_thread(book.entered.wait, PATIENCE)
        waiting += [group_commit.submit(events(*(str(number) for number in range(500)))) for _ in range(2)]
        with pytest.raises(IngestOverloaded):
            group_commit.submit(events("one too many"))
        book.may_commit.set()
        await asyncio.gather(*waiting)
        assert len(await group_commit.submit(events("after"))) == 1

    run(story)


def test_who_stops_waiting_takes_nothing_back_and_disturbs_nobody(book: Book, group_commit: GroupCommit) -> None:
    async def story() -> None:
        book.may_commit.clear()
        impatient, patient = group_commit.submit(events("e1")), group_commit.submit(events("e2"))
        asyncio.ensure_future(impatient).cancel()
        book.may_commit.set()
        assert len(await patient) == 1

    run(story)
    assert sorted(id for each in book.transactions for id in each) == ["e1", "e2"]


def test_many_loops_are_served_by_one_writer(book: Book, group_commit: GroupCommit) -> None:
    async def story() -> int:
        return len(await group_commit.submit(events("e1")))

    threads = [threading.Thread(target=lambda: run(story)) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE)
    assert sum(len(each) for each in book.transactions) == 4


def test_closing_stores_what_waits(book: Book, group_commit: GroupCommit) -> None:
    async def story() -> None:
        handed_in = [group_commit.submit(events(f"e{number}")) for number in range(5)]
        await asyncio.to_thread(group_commit.close)
        assert [len(each) for each in await asyncio.gather(*handed_in)] == [1] * 5

    run(story)
