"""Collect and unpack the evidence of a failed run: screenshot, HTML and log."""

from __future__ import annotations

import zlib
from pathlib import Path

import structlog

from rpa_tasks.browsers import devtools

log = structlog.get_logger(__name__)

SNAPSHOT_TIME_LIMIT = 15.0  #: seconds for the browser to export its page; a browser that hangs has no evidence
PIECE_LIMIT = 1_000_000  #: bytes of each item
UNPACKED_LIMIT = 4_000_000  #: bytes of an unpacked text; a few bytes of zlib can expand to gigabytes


def collect_evidence(port: int | None, log_path: Path) -> dict[str, bytes]:
    """Return the evidence by `Evidence.Kind`. Raises nothing: an item that cannot be read is missing."""
    found = _capture_page(port) if port else {}
    try:
        text = log_path.read_bytes()[-PIECE_LIMIT:]
    except OSError:
        text = b""
    if text:
        found["log"] = zlib.compress(text)
    return found


def _capture_page(port: int) -> dict[str, bytes]:
    try:
        found = devtools.take_snapshot(port, timeout=SNAPSHOT_TIME_LIMIT, limit=PIECE_LIMIT)
    except devtools.NoAnswer as error:
        log.warning("evidence_not_saved", error=str(error)[:300])
        return {}
    html = found.html.encode(errors="replace")[:PIECE_LIMIT]
    return {"screenshot": found.screenshot, "html": zlib.compress(html)}


def unpack_text(text: bytes) -> bytes:
    """Unpack at most 4 MB of a text that `collect_evidence` packed. Data that is not zlib is returned as it is."""
    try:
        return zlib.decompressobj().decompress(text, UNPACKED_LIMIT)
    except zlib.error:
        return text[:UNPACKED_LIMIT]
