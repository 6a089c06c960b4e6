"""Read the output of a command: masked lines for log and tail, and messages for the runner."""

from __future__ import annotations

import os

from rpa_tasks.supervisor.protocol import Outbox

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

LONGEST_LINE = 65_536
#: Shorter secrets would mask ordinary words.
SHORTEST_SECRET = 4
TAIL_CHARACTERS = 8_000
MESSAGE_CHARACTERS = 200
LOG_KEPT = 1_000_000  #: bytes at the end of the output that the log has at least; it has at most twice as many
CHUNK = 65_536
#: A pipe whose writers are dead holds no more chunks; a surviving process could fill it forever.
DRAINED_CHUNKS = 64


class OutputReader:
    """The two streams of a command, merged line by line in the order of reading."""

    def __init__(self, log_path: str, mask: list[str], outbox: Outbox) -> None:
        self.tail = b""  #: the end of the output, of which `decode_tail` makes a text
        self.error = ""  #: why its result was rejected
        self._log = RunLog(log_path)
        self._mask = Mask(mask)
        self._outbox = outbox
        self._streams: dict[int, Lines] = {}
        self._message_stream = -1
        self._has_result = False

    def attach(self, output: int, errors: int) -> None:
        """Start reading both streams. Only standard output may contain messages to the runner."""
        self._message_stream = output
        for descriptor in (output, errors):
            os.set_blocking(descriptor, False)
            self._streams[descriptor] = Lines(self._mask)

    def __contains__(self, descriptor: int) -> bool:
        return descriptor in self._streams

    def read_available(self, descriptor: int) -> bool:
        """Read once. Returns False if there was nothing to read; closes and removes a stream at its end."""
        try:
            data = os.read(descriptor, CHUNK)
        except BlockingIOError:
            return False
        if data:
            self._note(descriptor, *self._streams[descriptor].feed(data))
        else:
            self._note(descriptor, *self._streams.pop(descriptor).finish())
            os.close(descriptor)
        return bool(data)

    def finish(self) -> None:
        """Read the rest of the pipes, including lines without a final newline."""
        for descriptor in list(self._streams):
            for _ in range(DRAINED_CHUNKS):
                if not self.read_available(descriptor):
                    break
            if descriptor in self._streams:
                self._note(descriptor, *self._streams[descriptor].finish())

    def _note(self, descriptor: int, shown: bytes, messages: list[bytes], lost_result: bool) -> None:
        self._log.write(shown)
        self.tail = (self.tail + shown)[-4 * TAIL_CHARACTERS :]
        if descriptor != self._message_stream:
            return
        if lost_result and not self._has_result:
            self.error = "result_too_long"
        for line in messages:
            try:
                value = parse_message(line, self._mask)
                if value is None or ("result" in value and not isinstance(value["result"], dict)):
                    self._note_unreadable(line)
                elif "result" in value and not self._has_result:
                    self._has_result, self.error = True, ""
                    self._outbox.send_event({"result": value["result"]})
                elif progress := progress_in(value):
                    self._outbox.progress(progress)
            except Exception:  # no output of a command may end the supervisor process
                self._note_unreadable(line)

    def _note_unreadable(self, line: bytes) -> None:
        if b'"result"' in line[:64] and not self._has_result:
            self.error = "result_not_readable"


def decode_tail(output: bytes) -> str:
    """Return the last characters of an output, without those that PostgreSQL refuses."""
    return output.decode("utf-8", "replace").replace("\0", "\ufffd")[-TAIL_CHARACTERS:]


class RunLog:
    """The end of the output in a file. A full disk or a file that cannot be opened loses only the log."""

    def __init__(self, path: str) -> None:
        self._size = 0
        try:
            self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
        except OSError:
            self._file = -1

    def write(self, data: bytes) -> None:
        try:
            while self._file >= 0 and data:
                if self._size >= 2 * LOG_KEPT:
                    # What is written last stays at the end of the file: a killed supervisor process leaves it.
                    kept = os.pread(self._file, LOG_KEPT, self._size - LOG_KEPT)
                    os.pwrite(self._file, kept, 0)
                    os.ftruncate(self._file, len(kept))
                    self._size = len(kept)
                written = os.pwrite(self._file, data[: 2 * LOG_KEPT - self._size], self._size)
                self._size += written
                data = data[written:]
        except OSError:
            return


class Mask:
    """Replace secrets. A secret of several lines is masked line by line, as it is printed."""

    def __init__(self, secrets: list[str]) -> None:
        parts = {part for secret in secrets for part in secret.splitlines() if len(part) >= SHORTEST_SECRET}
        self._texts = sorted(parts, key=len, reverse=True)  # the longest first: one may contain another
        self._secrets = [text.encode("utf-8", "surrogateescape") for text in self._texts]
        self.reach = max((len(secret) for secret in self._secrets), default=1) - 1

    def __call__(self, data: bytes) -> bytes:
        for secret in self._secrets:
            data = data.replace(secret, b"***")
        return data

    def clean(self, value: Any) -> Any:
        """Return a JSON value without secrets and without characters that PostgreSQL refuses."""
        if isinstance(value, str):
            for secret in self._texts:
                value = value.replace(secret, "***")
            return value.replace("\0", "\ufffd").encode("utf-8", "replace").decode()
        if isinstance(value, dict):
            return {self.clean(key): self.clean(each) for key, each in value.items()}
        if isinstance(value, list):
            return [self.clean(each) for each in value]
        return value


class Lines:
    """One stream, split into lines. A line beyond the limit is passed on in pieces."""

    def __init__(self, mask: Mask) -> None:
        self._mask = mask
        self._rest = b""
        self._inside = False  # inside a line that is passed on in pieces

    def feed(self, data: bytes) -> tuple[bytes, list[bytes], bool]:
        """Take in data. Returns masked output for the log, unmasked candidate messages, and whether a result was too
        long.
        """
        data = self._rest + data
        cut = data.rfind(b"\n") + 1
        whole, self._rest = data[:cut], data[cut:]
        lines = whole.split(b"\n")[self._inside : -1]
        messages = [line for line in lines if line.startswith(b"{") and (b'"progress"' in line or b'"result"' in line)]
        fitting = [line for line in messages if len(line) <= LONGEST_LINE]
        self._inside = self._inside and not whole
        shown = self._mask(whole)
        lost = any(_starts_like_result(line) for line in messages if len(line) > LONGEST_LINE)
        if len(self._rest) > LONGEST_LINE:
            lost |= not self._inside and _starts_like_result(self._rest)
            self._inside = True
            masked = self._mask(self._rest)
            end = max(len(masked) - self._mask.reach, 0)  # a secret may start behind this position
            self._rest = masked[end:]
            shown += masked[:end]
        return shown, fitting, lost

    def finish(self) -> tuple[bytes, list[bytes], bool]:
        """Flush a last line without a newline."""
        return self.feed(b"\n") if self._rest else (b"", [], False)


def _starts_like_result(line: bytes) -> bool:
    return line.startswith(b"{") and b'"result"' in line[:64]


def parse_message(line: bytes, mask: Mask) -> dict[str, Any] | None:
    """Parse a message and remove secrets. None if it is no JSON object or cannot be stored."""
    import json  # most commands send no message, and the import takes 4 ms

    try:
        value = mask.clean(json.loads(line.decode("utf-8", "replace")))
        json.dumps(value, allow_nan=False)
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None


def progress_in(value: dict[str, Any]) -> dict[str, Any] | None:
    """Return the progress in a message, limited to 0 to 1, or None."""
    fraction, message = value.get("progress"), value.get("message", "")
    if isinstance(fraction, bool) or not isinstance(fraction, int | float):
        return None
    try:
        share = min(max(float(fraction), 0.0), 1.0)
    except OverflowError:  # hundreds of digits
        return None
    text = message if isinstance(message, str) else ""
    return {"progress": share, "message": text[:MESSAGE_CHARACTERS]}
