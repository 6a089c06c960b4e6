"""How much a key may do in a minute, over all processes: a fixed window by the clock of Redis.

A process leases a slice of the minute's budget at a time, so that an event costs no round trip. What it leased and
did not use when the minute ends is lost: with many processes a key gets a few percent less than its limit, never more
(over the end of a minute, as with any fixed window, up to twice its limit in a short time).

Without Redis everything is allowed: a limit protects against a flood, and refusing everybody is the worse one.
"""

from __future__ import annotations

import threading
import time
from pathlib import Path

import structlog
from django.conf import settings
from redis.exceptions import RedisError

from scheduling.redis_client import connect

log = structlog.get_logger(__name__)

SCRIPT = Path(__file__).with_name("rates.lua").read_text(encoding="utf-8")
SOCKET_TIMEOUT = 0.2  #: seconds
BLIND = 5.0  #: seconds for which Redis is not asked again after it did not answer
LARGEST_SLICE = 500


class Budget:
    """One key's budget of one kind, as far as this process has leased it."""

    def __init__(self, name: str, rates: Rates) -> None:
        self._name = name
        self._rates = rates
        self._left = 0
        self._ends = 0.0  #: when the leased minute is over, by this process' monotonic clock
        self._spent = False  #: nothing more is to be had this minute
        self._taking = threading.Lock()
        self._leasing = threading.Lock()

    def take(self, count: int) -> float | None:
        """Seconds to wait (0: it is taken), or None where Redis has to be asked. Never blocks."""
        with self._taking:
            now = time.monotonic()
            if now < self._ends:
                if self._left >= count:
                    self._left -= count
                    return 0
                if self._spent:
                    return self._ends - now
        return 0 if self._rates.is_blind() else None

    def lease_and_take(self, count: int, limit: int) -> float:
        """The same, after asking Redis for more. Blocks for one round trip, at most for the socket's timeout."""
        with self._leasing:
            if (wait := self.take(count)) is not None:
                return wait
            wanted = max(count - self._left, min(LARGEST_SLICE, limit // 100))
            asked_at = time.monotonic()
            lease = self._rates.lease(self._name, limit, wanted)
            if lease is None:
                return 0
            granted, milliseconds = lease
            with self._taking:
                if asked_at >= self._ends:
                    self._left = 0
                # From before the question: the minute ends no later here than there.
                self._ends = asked_at + milliseconds / 1000
                self._left += granted
                self._spent = granted < wanted
        wait = self.take(count)
        return 0 if wait is None else wait


class Rates:
    """The budgets of this process."""

    def __init__(self, url: str) -> None:
        self._script = connect(url, timeout=SOCKET_TIMEOUT).register_script(SCRIPT)
        self._budgets: dict[str, Budget] = {}
        self._blind_until = 0.0

    def budget(self, key_id: int, meter: str) -> Budget:
        name = f"at:rate:{{{key_id}}}:{meter}"
        return self._budgets.get(name) or self._budgets.setdefault(name, Budget(name, self))

    def is_blind(self) -> bool:
        return time.monotonic() < self._blind_until

    def lease(self, name: str, limit: int, wanted: int) -> tuple[int, int] | None:
        """Up to `wanted`, and the milliseconds until the minute ends. None: Redis did not answer."""
        if self.is_blind():
            return None
        try:
            granted, milliseconds = self._script(keys=[name], args=[limit, wanted])
        except RedisError as error:
            self._blind_until = time.monotonic() + BLIND
            log.warning("rates_not_limited", error=str(error), seconds=BLIND)
            return None
        return int(granted), int(milliseconds)


_rates: Rates | None = None
_making = threading.Lock()


def rates() -> Rates:
    global _rates
    with _making:
        if _rates is None:
            _rates = Rates(settings.REDIS_URL)
        return _rates
