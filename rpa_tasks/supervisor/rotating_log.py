"""Keep the output of a command in a file of limited size: its start and its most recent part."""

from __future__ import annotations

import os

OMISSION_NOTE = b"\n[... %d bytes left out ...]\n"


class RotatingLog:
    """Log file whose first half is written once and whose second half is a ring, which `finish` puts in order.

    `limit` is in bytes, at least 200. A full disk or a file that cannot be opened loses only the log.
    """

    def __init__(self, path: str, limit: int) -> None:
        self._head = limit // 2
        self._ring = limit - self._head
        self._headed = 0  # bytes in the first half
        self._circled = 0  # bytes written to the second half, including overwritten ones
        self.dropped = 0
        try:
            self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
        except OSError:
            self._file = -1

    def write(self, data: bytes) -> None:
        room = self._head - self._headed
        if room > 0:
            self._headed += self._put(data[:room], self._headed)
            data = data[room:]
        if len(data) > self._ring:
            self.dropped += len(data) - self._ring
            data = data[len(data) - self._ring :]
        while data:
            at = self._circled % self._ring
            piece = data[: self._ring - at]
            self._circled += self._put(piece, self._head + at)
            data = data[len(piece) :]

    def finish(self) -> None:
        if self._file < 0:
            return
        try:
            if self._circled > self._ring:
                self._unroll()
        except OSError:
            pass  # the file stays unordered
        finally:
            os.close(self._file)
            self._file = -1

    def _put(self, data: bytes, at: int) -> int:
        """Write to the file and return the number of bytes. The rest is dropped."""
        written = 0
        try:
            while self._file >= 0 and written < len(data):
                written += os.pwrite(self._file, data[written:], at + written)
        except OSError:
            pass
        self.dropped += len(data) - written
        return written

    def _unroll(self) -> None:
        ring = os.pread(self._file, self._ring, self._head)
        at = self._circled % self._ring
        recent = (ring[at:] + ring[:at])[len(OMISSION_NOTE) + 20 :]
        recent = recent[recent.find(b"\n", 0, len(recent) // 4) + 1 :]  # from the start of a line, if one is near
        self.dropped += self._circled - len(recent)
        note = OMISSION_NOTE % self.dropped
        os.pwrite(self._file, note + recent, self._head)
        os.ftruncate(self._file, self._head + len(note) + len(recent))
