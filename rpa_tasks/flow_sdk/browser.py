"""Browser of a flow: one opened for a manual trial, and the tab of each run.

Workers give flows the browsers of their pool instead.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

from rpa_tasks.browsers import devtools
from rpa_tasks.browsers.chromium_program import NoProgram, find_program
from rpa_tasks.flow_sdk.errors import Misused, Transient

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page, Playwright


START_TIMEOUT = 30.0  #: seconds
CLOSE_TIMEOUT = 5.0  #: seconds to store its data before it is killed
FLAGS = (
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
def open_browser(profile: Path | None = None, *, show: bool = False) -> Iterator[int]:
    """Start a Chromium, yield its debug port, and close it at the end. Without a profile it has no logins.

    Raises: `Misused` if there is no Chromium or it does not start.
    """
    try:
        program = find_program(os.environ.get("RPA_CHROMIUM_PATH", ""))
    except NoProgram as error:
        raise Misused(str(error)) from None
    with TemporaryDirectory(prefix="flow-profile-", ignore_cleanup_errors=True) as passing:
        folder = (profile or Path(passing)).absolute()
        folder.mkdir(parents=True, exist_ok=True)
        words = [program, *FLAGS, f"--user-data-dir={folder}", *([] if show else ["--headless=new"])]
        if os.geteuid() == 0:
            words.append("--no-sandbox")  # otherwise it refuses to run as root
        with devtools.reserve_port() as port:
            process = subprocess.Popen(  # noqa: S603  (our own words)
                [*words, *devtools.debug_flags(port), "about:blank"],
                stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True,
            )  # fmt: skip
            try:
                path = _wait_for_debug_path(process, port)
            except BaseException:
                _end_process(process)
                raise
        try:
            yield port
        finally:
            # SIGTERM would lose the cookies of the last 30 seconds, and so a new login.
            with suppress(devtools.NoAnswer):
                devtools.send_command(port, path, "Browser.close", timeout=CLOSE_TIMEOUT)
            _end_process(process)


def _wait_for_debug_path(process: subprocess.Popen[bytes], port: int) -> str:
    """Return the path of its debugging socket."""
    ends_at = time.monotonic() + START_TIMEOUT
    while time.monotonic() < ends_at and process.poll() is None:
        with suppress(devtools.NoAnswer):
            return devtools.websocket_path(port)
        time.sleep(0.02)
    raise Misused("Chromium did not start. Is its profile in use, or, with --show, is there no display?")


def _end_process(process: subprocess.Popen[bytes]) -> None:
    """Wait for its end, then kill its process group: children of it may hang."""
    with suppress(subprocess.TimeoutExpired):
        process.wait(CLOSE_TIMEOUT)
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


HOST = "127.0.0.1"
CONNECT_TIMEOUT = 45.0  #: seconds; a Chromium that waits for a processor answers late
DEFAULT_PAGE_TIMEOUT = 30.0  #: seconds for one step on the page, unless the flow sets another limit
CLOSING_TIMEOUT = 2.0  #: seconds


class Tab:
    """The tab of a run, opened at its first use, so that a flow without a browser never loads Playwright."""

    def __init__(self, port: int | None, timeout: float) -> None:
        self._port = port
        self._timeout = timeout
        self._playwright: Playwright | None = None
        self._browser: Browser | None = None
        self._page: Page | None = None
        self._opened: list[Page] = []  #: the page and its pop-ups
        self._id = ""

    @property
    def page(self) -> Page:
        if self._page is None:
            self._open(self.browser)
        assert self._page is not None
        return self._page

    @property
    def browser(self) -> Browser:
        if self._browser is None:
            self._browser = self._connect()
        return self._browser

    def _connect(self) -> Browser:
        if self._port is None:
            raise Misused(
                "This flow uses a browser, but --param has no debug_port. "
                "Tick “needs a browser” at the flow, or start Chromium with --remote-debugging-port."
            )
        from playwright.sync_api import Error, sync_playwright

        self._playwright = sync_playwright().start()
        try:
            return self._playwright.chromium.connect_over_cdp(
                f"http://{HOST}:{self._port}", timeout=CONNECT_TIMEOUT * 1000
            )
        except Error as error:
            raise Transient(f"The browser on port {self._port} does not answer: {error.message}") from None

    def _open(self, browser: Browser) -> None:
        """Open the tab in the context that has the shop's cookies."""
        if not browser.contexts:
            raise Transient(f"The browser on port {self._port} has no profile.")
        context = browser.contexts[0]
        page = context.new_page()
        self._follow(page)
        page.set_default_timeout(min(DEFAULT_PAGE_TIMEOUT, self._timeout) * 1000)
        session = context.new_cdp_session(page)
        self._id = session.send("Target.getTargetInfo")["targetInfo"]["targetId"]
        session.detach()
        self._page = page

    def _follow(self, page: Page) -> None:
        self._opened.append(page)
        page.on("popup", self._follow)

    def leave(self, *, keep: bool) -> None:
        """Close the flow's pages unless `keep`, and disconnect from the browser, which continues to run."""
        for page in [] if keep else self._opened:
            page.close()
        if self._playwright:
            self._playwright.stop()
            self._playwright = self._browser = self._page = None

    def close_from_outside(self) -> None:
        """Close the page without Playwright, for a signal handler that may interrupt a Playwright call.

        Raises nothing: the process that stopped the flow cleans up.
        """
        if not self._id:
            return
        request = f"GET /json/close/{self._id} HTTP/1.1\r\nHost: {HOST}\r\nConnection: close\r\n\r\n"
        try:
            with socket.create_connection((HOST, self._port), CLOSING_TIMEOUT) as connection:
                connection.sendall(request.encode())
                connection.recv(1)
        except OSError:
            return
