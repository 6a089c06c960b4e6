"""One trace from the front door to the receiver."""

from __future__ import annotations

from typing import Any
from uuid import UUID

import pytest
import structlog

from scheduling import delivery
from scheduling.channels.base import Permanent
from scheduling.models import Event
from scheduling.tracing import read_traceparent
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
        assert delivery.sender().drain(10)

    its_own = Event.objects.get(user_id="bob").id
    assert {message.task_id: message.trace_id for message in theatre.heard} == {named: TRACE, unnamed: its_own}
    failed = {line["task_id"]: line for line in lines if line["event"] == "touch_failed"}
    assert {task_id: line["trace_id"] for task_id, line in failed.items()} == {
        str(named): TRACE.hex, str(unnamed): its_own.hex,
    }  # fmt: skip
    assert {line["reason"] for line in failed.values()} == {"refused"}
