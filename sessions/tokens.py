"""Issue, verify and revoke the signed, short-lived tokens that admit one user and one side to one session."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import NamedTuple

from django.core import signing

from sessions.frames import Frame
from sessions.store import client
from sessions.store.client import Server, decode_text

SALT = "sessions.token"
LONGEST_TOKEN = 6_000  #: characters; a longer token is not parsed


class BadToken(Exception):
    """The token is `missing`, `bad`, `expired`, `revoked`, or belongs to another session."""


@dataclass(frozen=True, slots=True)
class Admission:
    """The session, user and side of a token."""

    session_id: str
    user_id: str
    chat_id: str
    tag: str
    role: str
    ends_at: float = field(default=0.0, compare=False)  #: Unix time
    tags: tuple[str, ...] = ()
    issued_at: int = field(default=0, compare=False)  #: µs, by Redis; an earlier revocation does not apply

    def frame(self, kind: str, seq: int | None = None, *, epoch: str = "", spoken: bool = False) -> Frame:
        """Build a frame. The token's tags apply only to a session without any, because they may be outdated."""
        return Frame(
            self.session_id, self.user_id, self.chat_id, self.role, kind, seq, self.tag,
            epoch=epoch, spoken=spoken, first_tag=True, tags=self.tags,
        )  # fmt: skip


def issue_token(admission: Admission, lifetime: timedelta) -> tuple[str, datetime]:
    """Return a token and its end. A connection opened with it closes at that time. Raises `InvalidInput`."""
    admission.frame("ping")
    ends_at = int(time.time()) + int(lifetime.total_seconds())
    each = admission
    claims = [each.session_id, each.user_id, each.chat_id, each.tag, each.role, ends_at, each.issued_at, *each.tags]
    return signing.dumps(claims, salt=SALT), datetime.fromtimestamp(ends_at, UTC)


def verify_token(token: str, session_id: str) -> Admission:
    """Verify a token for a session, except whether it is revoked. Raises `BadToken`."""
    if not token:
        raise BadToken("missing")
    try:
        if len(token) > LONGEST_TOKEN:
            raise signing.BadSignature
        of_session, user_id, chat_id, tag, role, ends_at, issued_at, *tags = signing.loads(token, salt=SALT)
        admission = Admission(of_session, user_id, chat_id, tag, role, ends_at, tuple(tags), issued_at)
    except (signing.BadSignature, TypeError, ValueError) as error:
        raise BadToken("bad") from error
    if admission.session_id != session_id:
        raise BadToken("other_session")
    if ends_at <= time.time():
        raise BadToken("expired")
    return admission


# Revoke tokens of sessions. The clock of the session's shard in Redis orders its tokens and revocations.
#
# A revocation is kept as long as a token can live. It is lost with the data of Redis. Raises `StoreUnavailable` like
# the store.


MAX_LIFETIME = timedelta(hours=1)  #: of a token


class Revocation(NamedTuple):
    session_id: str
    side: str
    at: int  #: µs; tokens issued before are revoked


def read_issue_time(server: Server, session_id: str) -> int:
    """Return the time of a new token, µs. It is later than every earlier revocation of the session."""
    return _run(server, session_id, [])


def revoke_tokens(server: Server, session_id: str, sides: Sequence[str]) -> int:
    """Revoke the tokens issued for these sides of a session. Idempotent. Returns the time, µs."""
    return _run(server, session_id, [_member(session_id, side) for side in sides])


def is_revoked(server: Server, session_id: str, side: str, issued_at: int) -> bool:
    """Return whether a revocation is later than the token."""
    member, key = _member(session_id, side), client.REVOKED[client.shard_of(session_id)]
    (at,) = server.ask(lambda pipe: [pipe.zscore(key, member)])
    return at is not None and at > issued_at


def list_revocations(server: Server, after: Sequence[int]) -> list[list[Revocation]]:
    """Return the revocations of each shard after its time, µs, oldest first. Leaves out an unavailable node."""
    found = server.ask(
        lambda pipe: [
            pipe.zrangebyscore(key, f"({at}", "+inf", withscores=True)
            for key, at in zip(client.REVOKED, after, strict=True)
        ],
        partly=True,
    )
    return [[_parse_revocation(decode_text(name), int(at)) for name, at in members or ()] for members in found]


def _parse_revocation(member: str, at: int) -> Revocation:
    session_id, _, side = member.rpartition("\n")
    return Revocation(session_id, side, at)


def _run(server: Server, session_id: str, members: Sequence[str]) -> int:
    key = client.REVOKED[client.shard_of(session_id)]
    (at,) = server.run([("revoke", [key], [MAX_LIFETIME // timedelta(microseconds=1), *members])])
    return int(at)


def _member(session_id: str, side: str) -> str:
    return f"{session_id}\n{side}"
