"""Read how many workers, execution nodes and watchers the load needs. For KEDA's metrics-api and for scripts."""

from __future__ import annotations

from typing import Any

from django.conf import settings
from django.http import HttpRequest
from ninja import Router, Schema

from scheduling.api.auth import ApiKeyAuth
from scheduling.api.schemas import ProblemOut
from scheduling.db_timeouts import Deadline
from scheduling.monitoring.wanted_numbers import read_scaling

router = Router(tags=["scaling"], auth=ApiKeyAuth("metrics"))
PROBLEMS = (401, 403, 429, 503)


class ReasonOut(Schema):
    """`code`: `busy`, `backlog`, `late`, `live` (many chats), `held` (the need fell recently), `minimum`, `maximum`, or
    `no_answer` (a source did not answer)."""

    code: str
    text: str


class ScaleOut(Schema):
    """`wanted` is null while a source does not answer: keep what runs then."""

    running: int | None
    wanted: int | None
    minimum: int
    maximum: int
    reason: ReasonOut


class ScalingOut(Schema):
    workers: ScaleOut
    execution_nodes: ScaleOut
    watchers: ScaleOut


@router.get("/scaling", response={200: ScalingOut, PROBLEMS: ProblemOut})
def show_scaling(request: HttpRequest) -> dict[str, Any]:
    """Return the wanted numbers. They rise at once and fall after a span of lower need. All processes give the same
    answer for five seconds."""
    answers = read_scaling(Deadline(settings.TIMEOUTS.metrics))
    return {
        kind: {
            "running": answer.running,
            "wanted": answer.wanted,
            "minimum": answer.minimum,
            "maximum": answer.maximum,
            "reason": {"code": answer.code, "text": answer.text},
        }
        for kind, answer in answers.items()
    }
