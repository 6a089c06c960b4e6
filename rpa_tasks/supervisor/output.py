"""Split the output of a command into masked lines for the log and messages for the runner."""

from __future__ import annotations

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator
    from typing import Any

LONGEST_LINE = 65_536
#: Shorter secrets would mask ordinary words.
SHORTEST_SECRET = 4
TAIL_CHARACTERS = 8_000
MESSAGE_CHARACTERS = 200


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
        messages = list(_candidate_messages(whole, self._inside)) if whole else []
        fitting = [line for line in messages if len(line) <= LONGEST_LINE]
        self._inside = self._inside and not whole
        shown = self._mask(whole)
        lost = any(_starts_like_result(line) for line in messages if len(line) > LONGEST_LINE)
        if len(self._rest) > LONGEST_LINE:
            lost |= not self._inside and _starts_like_result(self._rest)
            shown += self._let_through()
        return shown, fitting, lost

    def finish(self) -> tuple[bytes, list[bytes], bool]:
        """Flush a last line without a newline."""
        return self.feed(b"\n") if self._rest else (b"", [], False)

    def _let_through(self) -> bytes:
        self._inside = True
        masked = self._mask(self._rest)
        cut = len(masked) - self._mask.reach  # a secret may start behind this position
        self._rest = masked[cut:]
        return masked[:cut]


def _starts_like_result(line: bytes) -> bool:
    return line.startswith(b"{") and b'"result"' in line[:64]


def _candidate_messages(whole: bytes, inside: bool) -> Iterator[bytes]:
    """Find candidate messages without a look at each other line, of which there may be a million."""
    at = whole.find(b"\n") + 1 if inside else 0
    if not whole.startswith(b"{", at):
        at = whole.find(b"\n{", max(at - 1, 0)) + 1
    while at < len(whole) and whole.startswith(b"{", at):
        stop = whole.find(b"\n", at)
        line = whole[at:stop]
        if b'"progress"' in line or b'"result"' in line:
            yield line
        at = whole.find(b"\n{", stop) + 1
        if at == 0:
            return


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


class Tail:
    """The last output, at most 8,000 characters."""

    def __init__(self) -> None:
        self._bytes = b""

    def add(self, data: bytes) -> None:
        self._bytes = (self._bytes + data)[-4 * TAIL_CHARACTERS :]

    def text(self) -> str:
        return self._bytes.decode("utf-8", "replace").replace("\0", "\ufffd")[-TAIL_CHARACTERS:]
