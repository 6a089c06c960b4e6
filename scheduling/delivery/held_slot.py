"""Let a quota slot count from the instant at which its message is sent.

A slot counts from its grant. A slow name server, connection or TLS handshake delays the request. Without a correction
its receiver would get more messages in a window than its quota: delayed ones together with those of the next window.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass

from scheduling.channels.base import CalendarQuota, Quota
from scheduling.channels.quota import MARGIN, QuotaGate

FRESH = MARGIN.total_seconds() / 2  #: seconds of delay that the margin of each window covers; costs no call of Redis


@dataclass(slots=True)
class HeldSlot:
    """The granted slot of a message that is not sent yet."""

    gate: QuotaGate
    quotas: Sequence[Quota | CalendarQuota]
    target_key: str
    slot: int
    counted_at: float  #: monotonic time, not after the grant

    async def renew(self) -> None:
        """Move a slot that is more than 0.1 s old to now. Wait while its receiver has no place for it.

        The caller has a time limit. A message of a minute's quota never waits, unless its grant is as old.
        """
        if not any(isinstance(each, Quota) for each in self.quotas):
            return
        while (asked_at := time.monotonic()) - self.counted_at > FRESH:
            moved, wait = await asyncio.to_thread(self.gate.move, self.quotas, self.target_key, self.slot)
            if moved:
                self.slot, self.counted_at = moved, asked_at
                return
            await asyncio.sleep(wait.total_seconds())
