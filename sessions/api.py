"""HTTP API of sessions, for gateways that keep their own sockets."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from datetime import datetime, timedelta
from http import HTTPStatus
from typing import Annotated, Any, Literal, cast

from django.http import HttpRequest, HttpResponse
from ninja import Field, Router, Schema, Status
from pydantic import ConfigDict

from scheduling.api.app import api
from scheduling.api.auth import ApiKeyAuth, charge, get_principal
from scheduling.api.schemas import FieldErrorOut, Problem, ProblemOut, Request, build_unavailable_problem
from scheduling.batching import BatcherOverloaded
from scheduling.errors import FieldError, InvalidInput, NotFound
from scheduling.ids import new_id
from sessions import tokens
from sessions.frames import AGENT, OTHER_USER, USER, Frame, check_id
from sessions.store import sessions, stats
from sessions.store.client import StoreUnavailable, instant_of_ms
from sessions.store.inbox import Post, Posted
from sessions.store.sessions import DROPPED, OUTCOMES, REFUSED, FrameEffect
from sessions.websocket import hub
from sessions.websocket.connection import ID_LENGTH, MAX_FRAME_BYTES, STALE_SEQ, FrameRequest, frame_writer

Side = Literal["user", "agent"]
Text = str  #: length and characters are checked by `Frame`, as for WebSockets


class ActivityIn(Request):
    """One frame. `user_id` is the user of the session, also in frames of the agent. `seq` increases over the life of
    the session, separately for each side; a restarted counter needs a new `epoch`. `tag` and `tags` together replace
    the session's tags; without both they stay. `spoken`: the user has written in this session before, so a ping starts
    the timer even if Redis lost the session."""

    model_config = ConfigDict(extra="forbid", strict=True, populate_by_name=False)

    user_id: Text
    chat_id: Text = ""
    sender: Annotated[Side, Field(alias="from")] = "user"
    kind: Text = "message"
    seq: int | None = None
    epoch: int | Text = ""
    tag: Text = ""
    tags: list[Text] = []
    spoken: bool = False


class BatchActivityIn(ActivityIn):
    session_id: Text


class NotedOut(Schema):
    """`counted`, `dropped`, or `idle` (no effect: a ping, or a frame of the agent in a closed session). The reason in
    `dropped` is `stale_seq` (its seq is not above the last) or `rate` (the key's rate admits no new session)."""

    outcome: Literal["counted", "dropped", "idle"]
    deadline: datetime | None  #: when the timer ends; null without a timer
    dropped: Literal["stale_seq", "rate"] | None = None


class BatchNotedOut(Schema):
    """As for one frame, or `refused`, where `errors` names the field. The other frames of the batch count."""

    outcome: Literal["counted", "dropped", "idle", "refused"]
    deadline: datetime | None
    dropped: Literal["stale_seq", "rate"] | None = None
    errors: list[FieldErrorOut] = []


class BatchOut(Schema):
    counted: int
    dropped: int
    idle: int
    refused: int
    items: list[BatchNotedOut]


class PolicyChoiceOut(Schema):
    """A policy of the session, and the session's tags that chose it; without tags: the default policy.

    Of the policies whose tags the session all has, the one with most tags applies; of equal ones, the one with the
    shortest threshold, then the first by key.
    """

    key: str
    tags: list[str]


class SessionOut(Schema):
    """`state`: `idle` (no timer), `armed` (timer set), `paused` (by a tool, a transfer or a queue), `silent` (silence
    detected, no message since) or `closed`. `why` is the state, the reason of the pause, or for `armed` `outside_hours`
    (no time counts now). For `idle` it is `no_message` (the user has not written yet),
    `customer_wrote` or `agent_wrote` (the policy runs after the other side's message), `unknown_writer` (Redis lost the
    session) or `policy_changed` (the next frame starts the timer)."""

    session_id: str
    user_id: str
    chat_id: str
    state: Literal["idle", "armed", "paused", "silent", "closed"]
    tags: list[str]
    #: The key of the policy of the timer: the answer policy while an agent is awaited, else the guide policy.
    policy: str = Field(alias="policy.key")
    policy_tags: list[str] = Field(
        alias="policy.tags"
    )  #: the session's tags that chose it; empty for the default policy
    guide_policy: PolicyChoiceOut | None = Field(alias="guide")  #: of the timer that waits for the customer
    answer_policy: PolicyChoiceOut | None = Field(alias="answer")  #: of the timer that waits for an agent
    awaited: Literal["customer", "agent"] | None  #: whose message the timer waits for
    why: str
    deadline: datetime | None
    last_user_at: datetime | None  #: pings do not count
    last_agent_at: datetime | None
    nudges: int  #: guide messages sent since the user's last message

    @staticmethod
    def resolve_awaited(found: stats.SessionSnapshot) -> str | None:
        return found.awaited or None


class MessageIn(Request):
    """A message to a chat. `agent`: it counts as the agent's message. `bot`: the timer stays as it is. A message with a
    known `id` is a duplicate."""

    model_config = ConfigDict(extra="forbid", strict=True, populate_by_name=False)

    sender: Annotated[Literal["agent", "bot"], Field(alias="from")] = "agent"
    text: Annotated[str, Field(pattern=r"\S", max_length=MAX_FRAME_BYTES // 4)]
    id: Annotated[str, Field(max_length=ID_LENGTH)] = ""


class MessageOut(Schema):
    id: str
    duplicate: bool


class TokenIn(Request):
    user_id: Text
    chat_id: Text = ""
    tag: Text = ""
    tags: list[Text] = []
    role: Side = "user"
    ttl_seconds: Annotated[int, Field(ge=1, le=int(tokens.MAX_LIFETIME.total_seconds()))] = 600


class TokenOut(Schema):
    token: str
    expires_at: datetime


@api.exception_handler(StoreUnavailable)
def answer_unavailable(request: HttpRequest, error: StoreUnavailable) -> HttpResponse:
    return build_unavailable_problem(
        "The live sessions cannot be reached. Nothing is lost by sending it again."
    ).response()


@api.exception_handler(BatcherOverloaded)
def answer_overloaded(request: HttpRequest, error: BatcherOverloaded) -> HttpResponse:
    return Problem(503, "Too many frames wait to be noted.", retry_after=1).response()


router = Router(tags=["sessions"], auth=ApiKeyAuth("sessions"))
PROBLEMS = (400, 401, 403, 404, 413, 422, 429, 503)
BATCH_LIMIT = 500
UNCHARGED = ApiKeyAuth("sessions", charged=False)  #: the view charges after it knows the owners of the frames


@router.post("/sessions/activity", response={200: BatchOut, PROBLEMS: ProblemOut}, auth=UNCHARGED)
async def post_batch(request: HttpRequest, sessions: list[BatchActivityIn]) -> dict[str, Any]:
    """Record up to 500 frames, those of one session in order. One invalid frame rejects the batch. A batch counts as
    one request. Above the key's rate, frames of known sessions are still recorded, and others are `dropped` for
    `rate`."""
    if not sessions:
        raise InvalidInput.of("sessions", "the batch is empty")
    if len(sessions) > BATCH_LIMIT:
        raise Problem(413, f"A batch may have {BATCH_LIMIT} frames; this one has {len(sessions)}.")
    frames, errors = [], []
    for place, each in enumerate(sessions):
        try:
            frames.append(_build_frame(each.session_id, each))
        except InvalidInput as error:
            errors += [FieldError(f"sessions.{place}.{wrong.field}", wrong.message) for wrong in error.errors]
    if errors:
        raise InvalidInput(*errors)
    admitted = await _charge_frames(request, frames, batch=True)
    noted = iter(await _record_frames([frame for frame, is_in in zip(frames, admitted, strict=True) if is_in]))
    items: list[dict[str, Any]] = []
    for place, is_in in enumerate(admitted):
        if not is_in:
            items.append({"outcome": "dropped", "deadline": None, "dropped": "rate"})
            continue
        effect = next(noted)
        if effect.outcome == REFUSED:
            wrong = {"field": f"sessions.{place}.user_id", "message": OTHER_USER}
            items.append({"outcome": "refused", "deadline": None, "errors": [wrong]})
        else:
            items.append(_serialize_effect(effect))
    found = Counter(each["outcome"] for each in items)
    return {**{name: found[name] for name in (*OUTCOMES.values(), "refused")}, "items": items}


@router.post("/sessions/{path:session_id}/activity", response={200: NotedOut, PROBLEMS: ProblemOut}, auth=UNCHARGED)
async def post_activity(request: HttpRequest, session_id: str, activity: ActivityIn) -> dict[str, Any]:
    """Record one frame, which starts the timer, pauses or closes the session. The key's rate never rejects a frame of
    a known session."""
    frame = _build_frame(session_id, activity)
    await _charge_frames(request, [frame], batch=False)
    (noted,) = await _record_frames([frame])
    if noted.outcome == REFUSED:
        raise InvalidInput.of("user_id", OTHER_USER)
    return _serialize_effect(noted)


@router.post("/sessions/{path:session_id}/token", response={200: TokenOut, PROBLEMS: ProblemOut})
async def post_token(request: HttpRequest, session_id: str, wish: TokenIn) -> dict[str, Any]:
    """Issue a token for one user, side and session: `/ws/v1/sessions/{session_id}?token=…`."""
    admission = tokens.Admission(session_id, wish.user_id, wish.chat_id, wish.tag, wish.role, tags=tuple(wish.tags))
    admission.frame("ping")  # validates the members
    issued_at = await asyncio.to_thread(tokens.read_issue_time, sessions.live_store().server, admission.session_id)
    token, expires_at = tokens.issue_token(replace(admission, issued_at=issued_at), timedelta(seconds=wish.ttl_seconds))
    return {"token": token, "expires_at": expires_at}


@router.delete("/sessions/{path:session_id}/token", response={204: None, PROBLEMS: ProblemOut})
async def delete_tokens(request: HttpRequest, session_id: str, role: Side | None = None) -> Status[None]:
    """Revoke all tokens issued so far for the session, or for one side. Their connections end in every web process.
    Later tokens are valid."""
    check_id(session_id)
    sides = [role] if role else [USER, AGENT]
    at = await asyncio.to_thread(tokens.revoke_tokens, sessions.live_store().server, session_id, sides)
    for side in sides:
        await hub.hub().notify(session_id, hub.revoked_notification(side, at))
    return Status(204, None)


@router.post("/sessions/{path:session_id}/messages", response={200: MessageOut, PROBLEMS: ProblemOut})
async def post_message(request: HttpRequest, session_id: str, message: MessageIn) -> dict[str, Any]:
    """Write a message into the chat. Open pages of both sides get it at once, others with their cursor. 404 if the
    session is unknown or closed."""
    found = await _read_snapshot(session_id)
    if found.closed:
        raise NotFound("The session is closed.")
    key = f"{message.sender}:{message.id}" if message.id else ""
    post = Post(session_id, message.id or str(new_id()), message.sender, message.text, key=key, user_id=found.user_id)
    if message.sender == AGENT:
        frame = Frame(session_id, found.user_id or "-", sender=AGENT)
        posted = cast("Posted", (await frame_writer().submit_and_wait(FrameRequest(frame, post))).posted)
    else:
        (posted,) = await asyncio.to_thread(sessions.live_store().put_messages, [post])
    if posted.outcome in ("no_session", "other_user"):  # closed since the read above, or another user's by now
        raise NotFound("There is no such session.")
    if posted.outcome == "stored":
        await hub.hub().notify(session_id, hub.message_notification(post, posted))
    return {"id": post.id, "duplicate": posted.outcome == "duplicate"}


@router.get("/sessions/{path:session_id}", response={200: SessionOut, PROBLEMS: ProblemOut})
async def get_session(request: HttpRequest, session_id: str) -> stats.SessionSnapshot:
    """Return the session from Redis. It expires a day after its last frame and an hour after its close; 404 then."""
    return await _read_snapshot(session_id)


@router.delete("/sessions/{path:session_id}", response={204: None, PROBLEMS: ProblemOut})
async def delete_session(request: HttpRequest, session_id: str) -> Status[None]:
    """Close the session. It gets no more guide messages, its connections end, its messages are deleted. A missing
    session counts as closed. Late frames do not reopen it, except a message of the user."""
    check_id(session_id)
    await _record_frames([Frame(session_id, "-", sender=AGENT, kind="close")])
    await asyncio.to_thread(sessions.live_store().delete_messages, session_id)
    await hub.hub().notify(session_id, hub.closed_notification(hub.API))
    return Status(204, None)


async def _read_snapshot(session_id: str) -> stats.SessionSnapshot:
    check_id(session_id)
    found = await asyncio.to_thread(stats.session_snapshot, sessions.live_store(), session_id)
    if not found.armed_at:
        raise NotFound("There is no such session.")
    return found


def _build_frame(session_id: str, body: ActivityIn) -> Frame:
    return Frame(
        session_id, body.user_id, body.chat_id, body.sender, body.kind, body.seq, body.tag,
        epoch=str(body.epoch), spoken=body.spoken, tags=body.tags,
    )  # fmt: skip


async def _charge_frames(request: HttpRequest, frames: Sequence[Frame], *, batch: bool) -> list[bool]:
    """Charge the frames to the key and return which of them are admitted.

    Above the rate, frames of known sessions are admitted. Otherwise all chats whose renewals were rejected would fall
    silent together.

    Raises:
        Problem: status 429 without an admitted frame.
    """
    try:
        await charge(get_principal(request))
        if batch:
            await charge(get_principal(request), "events", len(frames))
    except Problem as refused:
        if refused.status != HTTPStatus.TOO_MANY_REQUESTS:
            raise
        known = await asyncio.to_thread(sessions.live_store().known, [each.session_id for each in frames])
        if not any(known):
            raise
        return known
    return [True] * len(frames)


async def _record_frames(frames: Sequence[Frame]) -> list[FrameEffect]:
    """Write frames in the batch of the frame writer, together with frames of WebSockets."""
    return await frame_writer().submit_all_and_wait([FrameRequest(frame) for frame in frames])


def _serialize_effect(noted: FrameEffect) -> dict[str, Any]:
    deadline = instant_of_ms(noted.deadline_ms) if noted.deadline_ms else None
    dropped = STALE_SEQ if noted.outcome == DROPPED else None
    return {"outcome": OUTCOMES[noted.outcome], "deadline": deadline, "dropped": dropped}
