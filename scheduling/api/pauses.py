"""Pause and resume everything, a channel, or a node."""

from __future__ import annotations

from typing import Any

from django.http import HttpRequest
from ninja import Router

from scheduling import sql
from scheduling.api.auth import ApiKeyAuth, build_api_key_actor
from scheduling.api.schemas import PauseIn, PauseOut, ProblemOut, ResumeIn, ResumeOut
from scheduling.operations import commands

router = Router(tags=["pauses"], auth=ApiKeyAuth("touches"))
PROBLEMS = (400, 401, 403, 404, 413, 422, 429, 503)


@router.post("/pause", response={200: PauseOut, PROBLEMS: ProblemOut})
def pause(request: HttpRequest, wish: PauseIn) -> dict[str, Any]:
    """Pause touches of a scope: “all”, “channel:<key>” or “node:<key>”. Idempotent."""
    reason = f"{build_api_key_actor(request).name}: {wish.reason}" if wish.reason else build_api_key_actor(request).name
    with sql.brief_lock_waits():
        row = commands.pause_scope(wish.scope, reason=reason, actor=build_api_key_actor(request).name)
    return {"scope": row.scope, "reason": row.reason, "paused_at": row.paused_at}


@router.post("/resume", response={200: ResumeOut, PROBLEMS: ProblemOut})
def resume(request: HttpRequest, wish: ResumeIn) -> dict[str, Any]:
    """End a pause. The paused touches are spread over the next minutes."""
    with sql.brief_lock_waits():
        commands.resume_scope(wish.scope, actor=build_api_key_actor(request).name)
    return {"scope": wish.scope, "resumed": True}
