"""What a failed run leaves for the person who looks into it: the page as it was, and the log."""

from __future__ import annotations

import json
import subprocess
import sys
import zlib
from pathlib import Path
from tempfile import TemporaryDirectory

import structlog
from django.conf import settings

from rpa_tasks.browsers.health import minimal_environment

log = structlog.get_logger(__name__)

PATIENCE = 15  #: seconds for the browser to show its page; one that hangs has no more to say
LIMIT = 1_000_000  #: bytes of each piece
MOST = 4_000_000  #: bytes of a text that is shown; a few bytes of zlib may hold gigabytes


def collect(port: int | None, log_path: Path) -> dict[str, bytes]:
    """By `Evidence.Kind`. Raises nothing: what cannot be had is missing."""
    found = _page(port) if port else {}
    try:
        text = log_path.read_bytes()[-LIMIT:]
    except OSError:
        text = b""
    if text:
        found["log"] = zlib.compress(text)
    return found


def _page(port: int) -> dict[str, bytes]:
    try:
        with TemporaryDirectory(prefix="evidence-") as folder:
            words = [sys.executable, "-m", "rpa_tasks.browsers.playwright_driver", "snapshot"]
            words += ["--port", str(port), "--dir", folder]
            said = subprocess.run(  # noqa: S603  (our own words)
                words,
                capture_output=True,
                timeout=PATIENCE,
                check=True,
                cwd=settings.BASE_DIR,
                env=minimal_environment(),
            )
            files = json.loads(said.stdout.splitlines()[-1])
            found = {"screenshot": (Path(folder) / files["screenshot"]).read_bytes()}
            html = (Path(folder) / files["html"]).read_bytes()
    except (subprocess.SubprocessError, OSError, ValueError, LookupError) as error:
        log.warning("page_not_kept", error=str(error)[:300])
        return {}
    return {"screenshot": found["screenshot"][:LIMIT], "html": zlib.compress(html[:LIMIT])}


def unpacked(text: bytes) -> bytes:
    """A text as `collect` packed it, and no more of it than anybody reads; what is no zlib as it is."""
    try:
        return zlib.decompressobj().decompress(text, MOST)
    except zlib.error:
        return text[:MOST]
