"""A browser for trying a flow by hand. Workers lend flows the browsers of their pool instead."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from tempfile import TemporaryDirectory

from websockets.exceptions import WebSocketException
from websockets.sync.client import connect

from rpa_tasks.flow_sdk.errors import Misused

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
START_TIMEOUT = 30.0  #: seconds
CLOSE_TIMEOUT = 5.0  #: seconds to store what it keeps, before it is killed
FLAGS = (
    "--remote-debugging-port=0",  # a free one; the profile tells which
    "--no-first-run",
    "--no-default-browser-check",
    "--disable-breakpad",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--disable-search-engine-choice-screen",
    "--password-store=basic",
    "--window-size=1366,900",
)


@contextmanager
def opened(profile: Path | None = None, *, show: bool = False) -> Iterator[int]:
    """The debug port of a Chromium that is closed at the end. Without a profile it begins as a stranger everywhere.
    Misused: there is no Chromium, or it does not start."""
    with TemporaryDirectory(prefix="flow-profile-", ignore_cleanup_errors=True) as passing:
        folder = (profile or Path(passing)).absolute()
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "DevToolsActivePort").unlink(missing_ok=True)
        words = [_find(), *FLAGS, f"--user-data-dir={folder}", *([] if show else ["--headless=new"])]
        if os.geteuid() == 0:
            words.append("--no-sandbox")  # it refuses to run as root otherwise
        process = subprocess.Popen(  # noqa: S603  (our own words)
            [*words, "about:blank"],
            stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True,
        )  # fmt: skip
        port_file = folder / "DevToolsActivePort"
        try:
            yield _address(process, port_file)[0]
        finally:
            _ask_to_close(port_file)
            _end(process)


def _find() -> str:
    wanted = os.environ.get("RPA_CHROMIUM_PATH")
    for name in [wanted] if wanted else NAMES:
        if found := shutil.which(name):
            return found
    raise Misused(f"Chromium was not found ({wanted or ', '.join(NAMES)}). RPA_CHROMIUM_PATH says where it is.")


def _address(process: subprocess.Popen[bytes], file: Path) -> tuple[int, str]:
    """Port and path of its debugging socket."""
    ends_at = time.monotonic() + START_TIMEOUT
    while time.monotonic() < ends_at and process.poll() is None:
        with suppress(OSError, ValueError):
            port, path = file.read_text().split()
            return int(port), path
        time.sleep(0.02)
    raise Misused("Chromium did not start. Is its profile in use, or, with --show, is there no display?")


def _ask_to_close(file: Path) -> None:
    """On SIGTERM it loses the cookies of the last half minute, and so a login that was just made."""
    with suppress(OSError, ValueError, WebSocketException):
        port, path = file.read_text().split()
        with connect(f"ws://127.0.0.1:{port}{path}", proxy=None, open_timeout=CLOSE_TIMEOUT) as socket:
            socket.send('{"id": 1, "method": "Browser.close"}')
            socket.recv(timeout=CLOSE_TIMEOUT)


def _end(process: subprocess.Popen[bytes]) -> None:
    """Its group is killed in any case: its own children may hang."""
    with suppress(subprocess.TimeoutExpired):
        process.wait(CLOSE_TIMEOUT)
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
