"""The live sessions over HTTP, for gateways that keep their own sockets."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

from django.http import HttpRequest
from ninja import Router, Status

from scheduling.api.auth import ApiKeyAuth, charge_events, principal_of
from scheduling.api.problems import RETRY_AFTER, Problem
from scheduling.api.schemas import ProblemOut
from scheduling.errors import FieldError, InvalidInput
from sessions import hub, inbox, tokens
from sessions.desk import Slip, desk
from sessions.frames import AGENT, Frame, check_id
from sessions.gathering import Overloaded
from sessions.schemas import ActivityIn, BatchActivityIn, BatchOut, NotedOut, TokenIn, TokenOut
from sessions.server import StoreAway
from sessions.store import COUNTED, DROPPED, IDLE, Noted, instant

router = Router(tags=["sessions"], auth=ApiKeyAuth("sessions"))
PROBLEMS = (400, 401, 403, 404, 413, 422, 429, 503)
BATCH_LIMIT = 500
OUTCOMES = {COUNTED: "counted", DROPPED: "dropped", IDLE: "idle"}


@router.post("/sessions/activity", response={200: BatchOut, PROBLEMS: ProblemOut})
async def post_batch(request: HttpRequest, batch: list[BatchActivityIn]) -> dict[str, Any]:
    """Note up to 500 frames, those of one session in their order. All of them count, or none where one does not fit."""
    if not batch:
        raise InvalidInput.of("", "the batch is empty")
    if len(batch) > BATCH_LIMIT:
        raise Problem(413, f"A batch may have {BATCH_LIMIT} frames; this one has {len(batch)}.")
    frames, errors = [], []
    for place, each in enumerate(batch):
        try:
            frames.append(_frame(each.session_id, each))
        except InvalidInput as error:
            errors += [FieldError(f"{place}.{wrong.field}", wrong.message) for wrong in error.errors]
    if errors:
        raise InvalidInput(*errors)
    await charge_events(principal_of(request), len(frames))
    noted = await _note(frames)
    found = Counter(OUTCOMES[each.outcome] for each in noted)
    return {**{name: found[name] for name in OUTCOMES.values()}, "items": [_told(each) for each in noted]}


@router.post("/sessions/{path:session_id}/activity", response={200: NotedOut, PROBLEMS: ProblemOut})
async def post_activity(request: HttpRequest, session_id: str, activity: ActivityIn) -> dict[str, Any]:
    """Note one frame: the session is armed anew, paused or closed."""
    (noted,) = await _note([_frame(session_id, activity)])
    return _told(noted)


@router.post("/sessions/{path:session_id}/token", response={200: TokenOut, PROBLEMS: ProblemOut})
async def post_token(request: HttpRequest, session_id: str, wish: TokenIn) -> dict[str, Any]:
    """A token that lets one user, as one side, into one session: `/ws/v1/sessions/{session_id}?token=…`."""
    admission = tokens.Admission(session_id, wish.user_id, wish.chat_id, wish.tag, wish.role)
    token, expires_at = tokens.issue(admission, timedelta(seconds=wish.ttl_seconds))
    return {"token": token, "expires_at": expires_at}


@router.delete("/sessions/{path:session_id}", response={204: None, PROBLEMS: ProblemOut})
async def delete_session(request: HttpRequest, session_id: str) -> Status[None]:
    """Close the session: nothing more is sent for its silence, its connections end, its messages are forgotten. One
    that is not there is closed already. What comes late does not open it again, unless the user writes."""
    check_id(session_id)
    await _note([Frame(session_id, "-", sender=AGENT, kind="close")])
    try:
        await asyncio.to_thread(inbox.live().forget, session_id)
    except StoreAway as error:
        raise _away() from error
    await hub.hub().tell(session_id, hub.closed(hub.API))
    return Status(204, None)


def _frame(session_id: str, told: ActivityIn) -> Frame:
    return Frame(session_id, told.user_id, told.chat_id, told.sender, told.kind, told.seq, told.tag)


async def _note(frames: Sequence[Frame]) -> list[Noted]:
    """Together with what comes in over WebSockets at this moment."""
    try:
        filed = await desk().ask_all([Slip(frame) for frame in frames])
    except StoreAway as error:
        raise _away() from error
    except Overloaded as error:
        raise Problem(503, "Too many frames wait to be noted.", retry_after=1) from error
    return [each.noted for each in filed]


def _away() -> Problem:
    return Problem(503, "The live sessions cannot be reached. Nothing is lost by sending it again.",
                   retry_after=RETRY_AFTER)  # fmt: skip


def _told(noted: Noted) -> dict[str, Any]:
    deadline = instant(noted.deadline_ms) if noted.deadline_ms else None
    return {"outcome": OUTCOMES[noted.outcome], "deadline": deadline}
