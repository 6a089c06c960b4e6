"""Whether passes pile up in `ticks` because nobody takes them, or takes them too slowly."""

from __future__ import annotations

import time
from typing import Any

import structlog

log = structlog.get_logger(__name__)

QUEUE = "ticks"


class Pile:
    """One more pass does nothing that those which wait will not do. What waits is asked seldom: at rest, beat costs
    next to nothing. No clock but this process's is compared."""

    MOST = 30  #: messages: half a minute of passes, as none of them expires
    ASK_EVERY = 5.0  #: seconds

    def __init__(self) -> None:
        self._asked_at = float("-inf")
        self._stands = False

    def stands(self, producer: Any) -> bool:
        """Return whether so many passes wait that no other is published."""
        if time.monotonic() - self._asked_at > self.ASK_EVERY:
            self._note(producer.channel)
            self._asked_at = time.monotonic()
        return self._stands

    def _note(self, channel: Any) -> None:
        try:
            client = getattr(channel, "client", None)
            if client is not None:
                waiting = int(client.llen(QUEUE))
            else:
                # A channel of its own: RabbitMQ closes one that asks about a queue that is not there.
                with channel.connection.channel() as asking:
                    waiting = int(asking.queue_declare(QUEUE, passive=True).message_count)
        except Exception as error:  # whoever may not ask still publishes, and hears there if the broker is away
            log.warning("pile_unknown", error=str(error))
            waiting = 0
        stood, self._stands = self._stands, waiting > self.MOST
        if self._stands and not stood:
            log.warning("passes_held_back", waiting=waiting, problem=f"nobody takes what waits in {QUEUE}")
        elif stood and not self._stands:
            log.info("passes_published_again", waiting=waiting)
