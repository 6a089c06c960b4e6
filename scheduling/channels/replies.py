"""What a receiver's HTTP answer means, and how much of it is kept.

Sources: Standard Webhooks (2xx is success, 410 disables, 429/502/504 slow down, Retry-After is honoured), RFC 9110 for
the rest. A receiver that answers has received and says what became of it, with two exceptions that are `Unknown`: 502
and 504 come from a gateway, which does not know what the one behind it did; and any 5xx but 503 may hide an effect
where a repeat would have a second one.

Where a repeat has no second effect, a 4xx is retried too: an ingress that is being deployed answers 404, an expired
certificate or token 401 or 403. 410, 413 and 422 say something about the message or the address that no retry changes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from email.utils import parsedate_to_datetime

from scheduling.channels.base import Delivered, Outcome, Permanent, Transient, Unknown

REPLY_LENGTH = 1_000  # characters
LONGEST_RETRY_AFTER = timedelta(days=1)
GATEWAY = frozenset({502, 504})
NOT_PROCESSED = frozenset({408, 425, 429, 503})  #: the receiver says it did not even begin
FINAL = frozenset({410, 413, 422})  #: no retry changes the answer


@dataclass(frozen=True, slots=True)
class Response:
    """What came back. `headers` have lower-case names; `complete` is False where the body was cut short."""

    status: int
    headers: Mapping[str, str] = field(default_factory=dict)
    body: bytes = b""
    complete: bool = True

    @property
    def excerpt(self) -> str:
        return excerpt(self.body)


def excerpt(said: bytes | str) -> str:
    """The first 1,000 characters, without what PostgreSQL refuses: NUL and lone surrogates (JSON may spell them)."""
    start = said[: REPLY_LENGTH * 5]
    encoded = start if isinstance(start, bytes) else start.encode("utf-8", "replace")
    return encoded.decode("utf-8", "replace").replace("\x00", "")[:REPLY_LENGTH]


def judge_status(response: Response, *, repeatable: bool) -> Outcome:
    """The outcome of an answer whose status line decides. `repeatable`: a repeat has no second effect."""
    status, said = response.status, response.excerpt
    match status:
        case _ if 200 <= status < 300:
            return Delivered(said, status)
        case _ if 300 <= status < 400:
            return Permanent("redirect", "redirects are not followed", status)
        case 410:
            return Permanent("gone", said, status, disable_target=True)
        case 429:
            return Transient("throttled", said, retry_after(response), status)
        case _ if status in GATEWAY:
            return Unknown(f"http_{status}", said)
        case _ if status in NOT_PROCESSED or (400 <= status < 600 and repeatable and status not in FINAL):
            return Transient(f"http_{status}", said, retry_after(response), status)
        case _ if 500 <= status < 600:
            return Unknown(f"http_{status}", said)
        case _ if 400 <= status < 500:
            return Permanent(f"http_{status}", said, status)
    return Permanent("http_other", said, status)


def retry_after(response: Response, now: datetime | None = None) -> timedelta | None:
    """The receiver's `Retry-After`, 0 to one day: seconds or an HTTP date (RFC 9110, 10.2.3). None for the rest."""
    value = response.headers.get("retry-after", "").strip()
    if value.isascii() and value.isdigit():
        return min(timedelta(seconds=int(value[:10])), LONGEST_RETRY_AFTER)
    try:
        until = parsedate_to_datetime(value)
        wait = (until if until.tzinfo else until.replace(tzinfo=UTC)) - (now or datetime.now(UTC))
    except (ValueError, TypeError, IndexError, OverflowError):
        return None
    return max(timedelta(0), min(wait, LONGEST_RETRY_AFTER))
