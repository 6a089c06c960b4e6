"""JSON schemas of the sessions API."""

from __future__ import annotations

from datetime import datetime
from typing import Annotated, Literal

from ninja import Field, Schema
from pydantic import ConfigDict

from scheduling.api.schemas import FieldErrorOut, Request
from sessions.websocket.tokens import LONGEST

Side = Literal["user", "agent"]
Text = str  #: how long a text may be and what it may hold is the frame's to say, whichever way it came in


class ActivityIn(Request):
    """One frame. `user_id` is the user of the session, also in frames of the agent. `seq` increases over the life of
    the session, separately for each side; a restarted counter needs a new `epoch`. `spoken`: the user has written in
    this session before, so a ping starts the timer even if Redis lost the session."""

    model_config = ConfigDict(extra="forbid", strict=True, populate_by_name=False)

    user_id: Text
    chat_id: Text = ""
    sender: Annotated[Side, Field(alias="from")] = "user"
    kind: Text = "message"
    seq: int | None = None
    epoch: int | Text = ""
    tag: Text = ""
    spoken: bool = False


class BatchActivityIn(ActivityIn):
    session_id: Text


class NotedOut(Schema):
    """`counted`, `dropped`, or `idle` (no effect: a ping, or a frame of the agent in a closed session). The reason in
    `dropped` is `stale_seq` (its seq is not above the last) or `rate` (the key's rate admits no new session)."""

    outcome: Literal["counted", "dropped", "idle"]
    deadline: datetime | None  #: when the session will have been silent too long; null while it is not armed
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


class SessionOut(Schema):
    """`state`: `idle` (the user has not written yet), `armed` (timer set), `paused` (by a tool, a transfer or a queue),
    `silent` (silence detected, no message since) or `closed`."""

    session_id: str
    user_id: str
    chat_id: str
    state: Literal["idle", "armed", "paused", "silent", "closed"]
    tags: list[str]
    policy: str  #: the tag whose policy holds
    deadline: datetime | None
    last_user_at: datetime | None  #: pings do not count
    last_agent_at: datetime | None
    nudges: int  #: guide messages that went out since the user's last word


class TokenIn(Request):
    user_id: Text
    chat_id: Text = ""
    tag: Text = ""
    role: Side = "user"
    ttl_seconds: Annotated[int, Field(ge=1, le=int(LONGEST.total_seconds()))] = 600


class TokenOut(Schema):
    token: str
    expires_at: datetime
