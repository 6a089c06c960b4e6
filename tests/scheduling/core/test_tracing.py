"""One trace from the HTTP API to the receiver."""

import json
import subprocess
from contextlib import suppress
from datetime import timedelta
from uuid import UUID

import pytest
import structlog
from django.db import transaction

from config.environment import ROOT
from scheduling.channels.base import Delivered, Permanent, Transient
from scheduling.ids import new_id
from scheduling.ledger.touches import touch_ledger
from scheduling.models import Event
from scheduling.operations.commands import pause_scope, resume_scope
from scheduling.planning.ingest import NewEvent, record_events
from scheduling.tracing import read_traceparent
from tests.docs.pages import commands
from tests.scheduling.core.conftest import deliver_when_due
from tests.support.tables import each_row

TRACE = UUID("4bf92f3577b34da6a3ce929d0e0e4736")
THEIRS = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"  # the recommendation's example


@each_row("value", [THEIRS, THEIRS.replace("-01", "-00"), THEIRS.replace("00-4", "cc-4"), "cc" + THEIRS[2:] + "-more"])
def test_read_traceparent_reads_valid_value(value):
    assert read_traceparent(value) == TRACE


@each_row(
    "value",
    [
        None, 1, "", "00", "ff" + THEIRS[2:], THEIRS + "-more", THEIRS.upper(), THEIRS[:-1], THEIRS + "\n",
        f"00-{'0' * 32}-00f067aa0ba902b7-01", f"00-{TRACE.hex}-{'0' * 16}-01", THEIRS.replace("f", "g"),
    ],
)  # fmt: skip
def test_read_traceparent_invalid_is_none(value):
    assert read_traceparent(value) is None


@pytest.mark.django_db(transaction=True)
def test_touch_passes_trace_to_channel_and_log(shop):
    shop.node(channel=shop.create_channel())
    shop.answer(Permanent("refused"))
    (named,) = shop.record_event(trace_id=TRACE).task_ids
    (unnamed,) = shop.record_event(user="bob").task_ids
    with structlog.testing.capture_logs() as lines:
        deliver_when_due(named, unnamed)

    its_own = Event.objects.get(user_id="bob").id
    assert {each.task_id: each.trace_id for each in shop.fake_channel.received} == {named: TRACE, unnamed: its_own}
    failed = {line["task_id"]: line for line in lines if line["event"] == "touch_failed"}
    assert {task_id: line["trace_id"] for task_id, line in failed.items()} == {
        str(named): TRACE.hex, str(unnamed): its_own.hex,
    }  # fmt: skip
    assert {line["reason"] for line in failed.values()} == {"refused"}


@pytest.fixture
def grep(capsys, tmp_path):
    """The page's own command on what this process has written so far: what it finds, in the order of the log."""
    written = tmp_path / ".state/logs/all.log"
    written.parent.mkdir(parents=True)

    def grep(trace):
        with written.open("a", encoding="utf-8") as log:
            log.write(capsys.readouterr().err)
        page = (ROOT / "docs/how-to/follow-an-event.md").read_text("utf-8")
        script = "\n".join(commands(page)).replace(TRACE.hex, trace)
        found = subprocess.run(["bash", "-c", script], cwd=tmp_path, capture_output=True, text=True, check=False)
        return [json.loads(line) for line in found.stdout.splitlines()]

    return grep


def ends(lines):
    return [(line["event"], line.get("state", ""), line.get("reason", "")) for line in lines]


@pytest.mark.django_db(transaction=True)
def test_log_follows_each_event_to_the_end_of_its_touch(shop, grep):
    shop.node(channel=shop.create_channel(retry_delays=[60]), cancel_on=["order.paid"])
    stored = ("events_stored", "", "")
    again, cancelled = new_id(), new_id()

    (task_id,) = shop.record_event(trace_id=TRACE).task_ids
    shop.record_event(user="bob")
    shop.answer(Transient("busy"))
    deliver_when_due(task_id)
    shop.answer(Delivered())
    deliver_when_due(task_id)
    lines = grep(TRACE.hex)
    assert ends(lines) == [stored, ("touches_settled", "scheduled", "busy"), ("touches_settled", "delivered", "")]
    assert [line["touches"] for line in lines] == [[f"{TRACE.hex}/{task_id}"]] * 3
    assert {line.get("channel", "fake") for line in lines} == {"fake"}

    (task_id,) = shop.record_event(trace_id=again).task_ids
    pause_scope("node:guide")
    deliver_when_due(task_id)
    resume_scope("node:guide")
    assert touch_ledger.resume_paused("node:guide", spread=timedelta(0))
    deliver_when_due(task_id)
    assert ends(grep(again.hex)) == [
        stored, ("touches_settled", "scheduled", "paused"), ("touches_settled", "suppressed", "dedupe"),
    ]  # fmt: skip

    (task_id,) = shop.record_event(user="cid", trace_id=cancelled).task_ids
    shop.record_event("order.paid", user="cid")
    assert [line["touches"] for line in grep(cancelled.hex)] == [[f"{cancelled.hex}/{task_id}"]]
    assert ends(grep(str(task_id))) == [stored, ("touches_settled", "cancelled", "event:order.paid")]


@pytest.mark.django_db(transaction=True)
def test_log_has_stored_events_but_not_rolled_back(record_event, grep):
    with suppress(RuntimeError), transaction.atomic():
        record_event(trace_id=TRACE)
        raise RuntimeError
    assert grep(TRACE.hex) == []
    record_event(trace_id=TRACE)
    assert [line["touches"] for line in grep(TRACE.hex)] == [[f"{TRACE.hex}/"]]


@pytest.mark.django_db(transaction=True)
def test_log_groups_50_touches_in_a_short_line(shop, capsys):
    shop.node(channel=shop.create_channel())
    receipts = record_events([NewEvent("shop", str(n), "material.downloaded", f"u{n}") for n in range(120)])
    deliver_when_due(*(task_id for each in receipts for task_id in each.task_ids))
    written = [line for line in capsys.readouterr().err.splitlines() if '"touches": [' in line]
    lines = [json.loads(line) for line in written]
    assert [line["count"] for line in lines if line["event"] == "events_stored"] == [50, 50, 20]
    delivered = [line for line in lines if line["event"] == "touches_settled"]
    assert sum(line["count"] for line in delivered) == 120
    assert len({name for line in delivered for name in line["touches"]}) == 120
    assert max(len(line.encode()) for line in written) < 4_096
