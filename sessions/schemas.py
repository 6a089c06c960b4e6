"""What the JSON of the sessions API looks like."""

from __future__ import annotations

from datetime import datetime
from typing import Annotated, Literal

from ninja import Field, Schema
from pydantic import ConfigDict

from scheduling.api.schemas import Request
from sessions.tokens import LONGEST

Side = Literal["user", "agent"]
Text = str  #: how long a text may be and what it may hold is the frame's to say, whichever way it came in


class ActivityIn(Request):
    """One frame. `seq` grows over the life of the session, for each side alone."""

    model_config = ConfigDict(extra="forbid", strict=True, populate_by_name=False)

    user_id: Text
    chat_id: Text = ""
    sender: Annotated[Side, Field(alias="from")] = "user"
    kind: Text = "message"
    seq: int | None = None
    tag: Text = ""


class BatchActivityIn(ActivityIn):
    session_id: Text


class NotedOut(Schema):
    """`counted`, `dropped` (its seq is not above the last), or `idle` (it changes nothing: a ping, or the agent's
    word in a closed session)."""

    outcome: Literal["counted", "dropped", "idle"]
    deadline: datetime | None  #: when the session will have been silent too long; null while it is not armed


class BatchOut(Schema):
    counted: int
    dropped: int
    idle: int
    items: list[NotedOut]


class TokenIn(Request):
    user_id: Text
    chat_id: Text = ""
    tag: Text = ""
    role: Side = "user"
    ttl_seconds: Annotated[int, Field(ge=1, le=int(LONGEST.total_seconds()))] = 600


class TokenOut(Schema):
    token: str
    expires_at: datetime
