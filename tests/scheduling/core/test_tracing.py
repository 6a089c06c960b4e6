"""One trace from the front door to the receiver."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Any
from uuid import UUID

import pytest
import structlog
from django.db import transaction

from config.environment import ROOT
from scheduling.channels.base import Delivered, Permanent, Transient
from scheduling.delivery.sender import sender
from scheduling.ledger.touches import touches
from scheduling.models import Event
from scheduling.operations.commands import pause_scope, resume_scope
from scheduling.planning.ingest import NewEvent, record_events
from scheduling.tracing import read_traceparent
from tests.docs.pages import commands
from tests.scheduling.core.conftest import deliver_at_last
from tests.scheduling.core.puppets import Theatre

TRACE = UUID("4bf92f3577b34da6a3ce929d0e0e4736")
THEIRS = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"  # the recommendation's example


@pytest.mark.parametrize(
    "value", [THEIRS, THEIRS.replace("-01", "-00"), THEIRS.replace("00-4", "cc-4"), "cc" + THEIRS[2:] + "-more"]
)
def test_a_trace_is_read(value: str) -> None:
    assert read_traceparent(value) == TRACE


@pytest.mark.parametrize(
    "value",
    [
        None, 1, "", "00", "ff" + THEIRS[2:], THEIRS + "-more", THEIRS.upper(), THEIRS[:-1], THEIRS + "\n",
        f"00-{'0' * 32}-00f067aa0ba902b7-01", f"00-{TRACE.hex}-{'0' * 16}-01", THEIRS.replace("f", "g"),
    ],
)  # fmt: skip
def test_what_cannot_be_read_begins_a_trace_of_its_own(value: object) -> None:
    assert read_traceparent(value) is None


@pytest.mark.django_db(transaction=True)
def test_a_touch_carries_it_to_its_channel_and_into_the_log(
    matrix: Any, puppet: Any, happen: Any, theatre: Theatre
) -> None:
    matrix.node(channel=puppet())
    theatre.play = lambda message: Permanent("refused")
    (named,) = happen(trace_id=TRACE).task_ids
    (unnamed,) = happen(user="bob").task_ids
    with structlog.testing.capture_logs() as lines:
        deliver_at_last(named, unnamed)
        assert sender().drain(10)

    its_own = Event.objects.get(user_id="bob").id
    assert {message.task_id: message.trace_id for message in theatre.heard} == {named: TRACE, unnamed: its_own}
    failed = {line["task_id"]: line for line in lines if line["event"] == "touch_failed"}
    assert {task_id: line["trace_id"] for task_id, line in failed.items()} == {
        str(named): TRACE.hex, str(unnamed): its_own.hex,
    }  # fmt: skip
    assert {line["reason"] for line in failed.values()} == {"refused"}


@pytest.fixture
def grep(capsys: Any, tmp_path: Path) -> Callable[..., list[dict[str, Any]]]:
    """The page's own command on what this process has written so far: what it finds, in the order of the log."""
    written = tmp_path / ".state/logs/all.log"
    written.parent.mkdir(parents=True)

    def grep(trace: str) -> list[dict[str, Any]]:
        with written.open("a", encoding="utf-8") as log:
            log.write(capsys.readouterr().err)
        page = (ROOT / "docs/how-to/follow-an-event.md").read_text("utf-8")
        script = "\n".join(commands(page)).replace(TRACE.hex, trace)
        found = subprocess.run(["bash", "-c", script], cwd=tmp_path, capture_output=True, text=True, check=False)
        return [json.loads(line) for line in found.stdout.splitlines()]

    return grep


def ends(lines: list[dict[str, Any]]) -> list[tuple[str, str, str]]:
    return [(line["event"], line.get("state", ""), line.get("reason", "")) for line in lines]


@pytest.mark.django_db(transaction=True)
def test_the_log_alone_follows_an_event_to_its_delivery(
    matrix: Any, puppet: Any, happen: Any, theatre: Theatre, grep: Any
) -> None:
    matrix.node(channel=puppet(retry_delays=[60]))
    (task_id,) = happen(trace_id=TRACE).task_ids
    happen(user="bob")
    theatre.play = lambda message: Transient("busy")
    deliver_at_last(task_id)
    theatre.play = lambda message: Delivered()
    deliver_at_last(task_id)
    lines = grep(TRACE.hex)
    assert ends(lines) == [
        ("events_stored", "", ""), ("touches_settled", "scheduled", "busy"), ("touches_settled", "delivered", ""),
    ]  # fmt: skip
    assert [line["touches"] for line in lines] == [[f"{TRACE.hex}/{task_id}"]] * 3
    assert {line.get("channel", "puppet") for line in lines} == {"puppet"}


@pytest.mark.django_db(transaction=True)
def test_what_was_held_and_what_was_turned_down_is_followed_as_well(
    matrix: Any, puppet: Any, happen: Any, theatre: Theatre, grep: Any
) -> None:
    matrix.node(channel=puppet())
    (first,) = happen().task_ids
    deliver_at_last(first)
    (again,) = happen(trace_id=TRACE).task_ids
    pause_scope("node:guide")
    deliver_at_last(again)
    resume_scope("node:guide")
    assert touches.resume_paused("node:guide", spread=timedelta(0))
    deliver_at_last(again)
    assert ends(grep(TRACE.hex)) == [
        ("events_stored", "", ""), ("touches_settled", "scheduled", "paused"),
        ("touches_settled", "suppressed", "dedupe"),
    ]  # fmt: skip


@pytest.mark.django_db(transaction=True)
def test_what_was_called_off_is_followed_by_the_touch_that_the_event_named(
    matrix: Any, puppet: Any, happen: Any, theatre: Theatre, grep: Any
) -> None:
    matrix.node(channel=puppet(), cancel_on=["order.paid"])
    (task_id,) = happen(trace_id=TRACE).task_ids
    happen("order.paid")
    (named,) = grep(TRACE.hex)
    assert named["touches"] == [f"{TRACE.hex}/{task_id}"]
    assert ends(grep(str(task_id))) == [
        ("events_stored", "", ""), ("touches_settled", "cancelled", "event:order.paid"),
    ]  # fmt: skip


@pytest.mark.django_db(transaction=True)
def test_an_event_that_plans_nothing_is_in_the_log_and_one_that_is_rolled_back_is_not(happen: Any, grep: Any) -> None:
    with suppress(RuntimeError), transaction.atomic():
        happen(trace_id=TRACE)
        raise RuntimeError
    assert grep(TRACE.hex) == []
    happen(trace_id=TRACE)
    assert [line["touches"] for line in grep(TRACE.hex)] == [[f"{TRACE.hex}/"]]


@pytest.mark.django_db(transaction=True)
def test_a_burst_pays_one_line_for_fifty_and_a_pipe_keeps_it_whole(
    matrix: Any, puppet: Any, theatre: Theatre, capsys: Any
) -> None:
    matrix.node(channel=puppet())
    receipts = record_events([NewEvent("shop", str(n), "material.downloaded", f"u{n}") for n in range(120)])
    deliver_at_last(*(task_id for each in receipts for task_id in each.task_ids))
    written = [line for line in capsys.readouterr().err.splitlines() if '"touches": [' in line]
    lines = [json.loads(line) for line in written]
    assert [line["count"] for line in lines if line["event"] == "events_stored"] == [50, 50, 20]
    delivered = [line for line in lines if line["event"] == "touches_settled"]
    assert sum(line["count"] for line in delivered) == 120
    assert len({name for line in delivered for name in line["touches"]}) == 120
    assert max(len(line.encode()) for line in written) < 4_096
