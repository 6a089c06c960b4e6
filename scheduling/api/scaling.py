"""Read how many workers, execution nodes and watchers the load needs. For KEDA's metrics-api and for scripts."""

from __future__ import annotations

from django.conf import settings
from django.http import HttpRequest
from ninja import Router, Schema

from scheduling.api.auth import ApiKeyAuth
from scheduling.api.schemas import ProblemOut
from scheduling.db_timeouts import Deadline
from scheduling.monitoring.wanted_numbers import Scale, read_scaling

router = Router(tags=["scaling"], auth=ApiKeyAuth("metrics"))
PROBLEMS = (401, 403, 429, 503)


class ScaleOut(Schema):
    """`running` and `wanted` are null while a source does not answer: keep what runs then."""

    running: int | None
    wanted: int | None


class ScalingOut(Schema):
    workers: ScaleOut
    execution_nodes: ScaleOut
    watchers: ScaleOut


@router.get("/scaling", response={200: ScalingOut, PROBLEMS: ProblemOut})
def show_scaling(request: HttpRequest) -> dict[str, Scale]:
    """Return how many processes the present load needs. The numbers are not smoothed: KEDA and the HPA do that."""
    return read_scaling(Deadline(settings.TIMEOUTS.metrics))
