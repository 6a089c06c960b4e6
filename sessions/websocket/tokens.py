"""Issue and verify the signed, short-lived tokens that admit one user and one side to one session."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta

from django.core import signing

from sessions.frames import Frame

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
