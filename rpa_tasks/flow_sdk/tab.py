"""The flow's tab in a browser that belongs to somebody else."""

from __future__ import annotations

import socket
from typing import TYPE_CHECKING

from rpa_tasks.flow_sdk.errors import Misused, Transient

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page, Playwright

HOST = "127.0.0.1"
CONNECT_TIMEOUT = 45.0  #: seconds; a Chromium that waits for a processor answers late
PATIENCE = 30.0  #: seconds that a step on the page may take, unless the flow says otherwise
CLOSING_TIMEOUT = 2.0  #: seconds


class Tab:
    """Opened at its first use, so that a flow without a browser never loads Playwright."""

    def __init__(self, port: int | None, timeout: float) -> None:
        self._port = port
        self._timeout = timeout
        self._playwright: Playwright | None = None
        self._browser: Browser | None = None
        self._page: Page | None = None
        self._opened: list[Page] = []  #: the page, and what pops up from it
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
        """In the context that has the shop's cookies."""
        if not browser.contexts:
            raise Transient(f"The browser on port {self._port} has no profile.")
        context = browser.contexts[0]
        page = context.new_page()
        self._follow(page)
        page.set_default_timeout(min(PATIENCE, self._timeout) * 1000)
        session = context.new_cdp_session(page)
        self._id = session.send("Target.getTargetInfo")["targetInfo"]["targetId"]
        session.detach()
        self._page = page

    def _follow(self, page: Page) -> None:
        self._opened.append(page)
        page.on("popup", self._follow)

    def leave(self, *, keep: bool) -> None:
        """Close what the flow opened, unless somebody may want to see it, and let go of the browser, which lives on."""
        for page in [] if keep else self._opened:
            page.close()
        if self._playwright:
            self._playwright.stop()
            self._playwright = self._browser = self._page = None

    def close_from_outside(self) -> None:
        """For a signal handler, where Playwright must not be called: it may be in the middle of something. Raises
        nothing: who stopped us cleans up behind us anyway."""
        if not self._id:
            return
        request = f"GET /json/close/{self._id} HTTP/1.1\r\nHost: {HOST}\r\nConnection: close\r\n\r\n"
        try:
            with socket.create_connection((HOST, self._port), CLOSING_TIMEOUT) as connection:
                connection.sendall(request.encode())
                connection.recv(1)
        except OSError:
            return
