"""A count that fails costs a count: what is stored is answered as stored."""

import asyncio
import json

import pytest
from django.test import RequestFactory

from scheduling import metrics as measures
from scheduling.api import events
from scheduling.ids import new_id
from scheduling.planning import ingest, request_metrics
from scheduling.planning.ingest import GroupCommit, NewEvent, Receipt
from tests.support.waiting import WAIT_LIMIT

GIVEN = [NewEvent("shop", "e1", "x", "ann"), NewEvent("shop", "e2", "x", "ann")]


@pytest.fixture(autouse=True)
def break_metrics(monkeypatch):
    """Nothing can be counted."""

    def fail(*_):
        raise OSError("no space left")

    for instrument in (request_metrics.events_ingested, request_metrics.requests, measures.ended):
        monkeypatch.setattr(instrument, "labels", fail)
    monkeypatch.setattr(request_metrics.commits, "observe", fail)


def receipts(given):
    return [Receipt(new_id(), False) for _ in given]


def test_stored_event_is_accepted_when_metrics_fail(monkeypatch):
    async def free(*_):
        pass

    async def submit(given):
        return receipts(given)

    monkeypatch.setattr(events, "read_each_event", lambda *_: GIVEN)
    monkeypatch.setattr(events, "get_principal", lambda _: None)
    monkeypatch.setattr(events, "charge", free)
    monkeypatch.setattr(events, "submit", submit)

    answer = asyncio.run(events.post_events(RequestFactory().post("/api/v1/events")))

    assert answer.status_code == 202
    assert json.loads(answer.content)["accepted"] == 2


def test_committed_group_is_not_repeated_when_metrics_fail(db, monkeypatch):
    commits = []

    def record(given, lock_wait):
        commits.append(len(given))
        return receipts(given)

    monkeypatch.setattr(ingest, "record_and_publish", record)
    group_commit = GroupCommit()

    async def story():
        async with asyncio.timeout(WAIT_LIMIT):
            assert len(await group_commit.submit(GIVEN)) == 2

    try:
        asyncio.run(story())
    finally:
        group_commit.close()
    assert commits == [2]
