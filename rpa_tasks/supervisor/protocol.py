"""What supervisor process and runner share: a clock, and pipes with orders in and events out.

Neither pipe may block the supervisor process: a stopped runner does not read, and its command must still be ended.

A line is a marshalled dictionary in hexadecimal: the import of `json` would cost a supervisor process 4 ms. Both ends
run the same Python, and no command inherits the pipes.
"""

from __future__ import annotations

import marshal
import os
import select
import time

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

PROGRESS_SECONDS = 0.5


def clock() -> float:
    """Return seconds that include the sleep of the machine, as the lease in PostgreSQL does."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


def pack_line(message: dict[str, Any]) -> bytes:
    """Return the line of a message. Raises `ValueError` for other types than those of JSON."""
    return marshal.dumps(message).hex().encode() + b"\n"


def unpack_line(line: bytes) -> dict[str, Any]:
    message: dict[str, Any] = marshal.loads(bytes.fromhex(line.decode()))  # noqa: S302  (from our other end)
    return message


class Inbox:
    """Lines from the other end. `closed` after its end."""

    def __init__(self, descriptor: int) -> None:
        self.descriptor = descriptor
        self.closed = False
        self._rest = b""

    def receive(self) -> list[dict[str, Any]]:
        """Return all lines that have arrived. Waits for data if the descriptor blocks."""
        try:
            data = os.read(self.descriptor, 65536)
        except BlockingIOError:
            return []
        self.closed = not data
        *lines, self._rest = (self._rest + data).split(b"\n")
        return [unpack_line(line) for line in lines]


class Outbox:
    """Events to the runner, kept until it reads them. Only the latest progress is kept."""

    def __init__(self, descriptor: int) -> None:
        self.descriptor = descriptor
        self.broken = False
        self._pending = b""
        self._progress: dict[str, Any] | None = None
        self._next_progress_at = 0.0
        os.set_blocking(descriptor, False)

    @property
    def waits(self) -> bool:
        """Return whether an event is waiting for space in the pipe."""
        return bool(self._pending) and not self.broken

    def send_event(self, event: dict[str, Any]) -> None:
        self._pending += pack_line(event)
        self.push()

    def progress(self, event: dict[str, Any]) -> None:
        self._progress = event

    def due_at(self) -> float | None:
        """Return when to call `release` next."""
        return None if self._progress is None or self._pending else self._next_progress_at

    def release(self, now: float) -> None:
        """Send the latest progress: at most twice a second, and never behind an unread event."""
        if self._progress is not None and now >= self._next_progress_at and not self._pending:
            self._next_progress_at = now + PROGRESS_SECONDS
            event, self._progress = self._progress, None
            self.send_event(event)

    def push(self) -> None:
        try:
            while self._pending and not self.broken:
                self._pending = self._pending[os.write(self.descriptor, self._pending) :]
        except BlockingIOError:
            return
        except OSError:
            self.broken = True

    def send_last_event(self, event: dict[str, Any], inbox: Inbox) -> None:
        """Send the last event and wait until the runner has taken it or has ended."""
        if self._progress is not None:
            self.send_event(self._progress)
        self.send_event(event)
        while self.waits and not inbox.closed:
            poll = select.poll()
            poll.register(self.descriptor, select.POLLOUT)
            poll.register(inbox.descriptor, select.POLLIN)
            poll.poll()
            inbox.receive()
            self.push()
