"""Who calls: the rows of API keys, remembered for a few seconds so that an event costs no query.

So a key that is revoked works for `REMEMBERED` seconds more in processes that have just seen it.
"""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import TypeVar

from scheduling.models import ApiKey, granted
from scheduling.operations.commands import digest_of

T = TypeVar("T")

REMEMBERED = 3.0  #: seconds
REMEMBERED_KEYS = 1_000
REMEMBERED_STRANGERS = 10_000  #: digests that are no key's; bounded, as anybody can make them up
LONGEST_KEY = 200


@dataclass(frozen=True, slots=True)
class Principal:
    """A valid key's row."""

    id: int
    name: str
    scopes: frozenset[str]
    rate_per_minute: int | None
    expires_at: datetime | None
    revoked_at: datetime | None

    def is_valid(self) -> bool:
        return self.revoked_at is None and (self.expires_at is None or self.expires_at > datetime.now(UTC))


class KeyRing:
    """Keys by their digest. `recall` never blocks; `look_up` asks the database."""

    def __init__(self) -> None:
        self._known: dict[str, tuple[float, Principal]] = {}
        self._strangers: dict[str, float] = {}
        self._changing = threading.Lock()

    def recall(self, key: str) -> tuple[bool, Principal | None]:
        """Whether an answer is remembered, and the answer: a valid key's row, or None."""
        if not key or len(key) > LONGEST_KEY or not key.isascii():
            return True, None
        digest, now = digest_of(key), time.monotonic()
        known = self._known.get(digest)
        if known and known[0] > now:
            return True, known[1] if known[1].is_valid() else None
        return self._strangers.get(digest, 0) > now, None

    def look_up(self, key: str) -> Principal | None:
        """Ask the database and remember the answer. Raises what the database raises."""
        digest = digest_of(key)
        row = ApiKey.objects.filter(digest=digest).first()
        until = time.monotonic() + REMEMBERED
        with self._changing:
            if row is None:
                self._known.pop(digest, None)
                _remember(self._strangers, digest, until, REMEMBERED_STRANGERS)
                return None
            principal = Principal(
                row.pk, row.name, granted(row.scopes), row.rate_per_minute, row.expires_at, row.revoked_at
            )
            self._strangers.pop(digest, None)
            _remember(self._known, digest, (until, principal), REMEMBERED_KEYS)
        return principal if principal.is_valid() else None

    def forget(self) -> None:
        with self._changing:
            self._known.clear()
            self._strangers.clear()


def _remember(store: dict[str, T], digest: str, value: T, limit: int) -> None:
    """The oldest goes when it is full."""
    store.pop(digest, None)
    while len(store) >= limit:
        del store[next(iter(store))]
    store[digest] = value


key_ring = KeyRing()
