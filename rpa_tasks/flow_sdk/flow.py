"""What a flow is run with: errors, messages, browser, parameters, and the end by a signal."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from types import FrameType
from typing import TYPE_CHECKING, Any, ClassVar, NoReturn

from rpa_tasks.browsers import devtools
from rpa_tasks.browsers.launch import COMMON_FLAGS, NoProgram, find_program

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page, Playwright


class FlowError(Exception):
    """Base class. Raise one of its subclasses.

    The class determines the exit status, and the status determines what happens to the job.
    """

    exit_code: ClassVar[int] = 70


class Transient(FlowError):
    """It may succeed later: tried again after 30, 60 and 120 seconds by default.

    Any exception that is not listed here counts like this one.
    """

    exit_code = 70


class BusinessError(FlowError):
    """A repeat cannot help: an operator must look at the job."""

    exit_code = 65


class SessionExpired(FlowError):
    """The shop is logged out: its jobs wait for a login by an operator, and no retry is used up."""

    exit_code = 77


class PlatformError(FlowError):
    """The platform rejects robots: tried again later. Several of these in a row stop all shops of the platform for a
    while.
    """

    exit_code = 75


class Misused(FlowError):
    """The command line does not fit the flow. Nothing has started."""

    exit_code = 64


TIMED_OUT = 124
INTERRUPTED = 130
TERMINATED = 143


RESULT_LIMIT = 60_000  #: bytes; the supervisor process does not read a longer line
MESSAGE_LIMIT = 200


class Wire:
    """Owns standard output. Output of the flow and of its child processes goes to standard error instead.

    A partial line before one of ours would make ours unreadable.
    """

    def __init__(self) -> None:
        sys.stdout.flush()
        self._descriptor = os.dup(1)
        os.set_inheritable(self._descriptor, False)
        os.dup2(2, 1)
        self.result_sent = False
        self.sending_result = False  #: during the output of the result: a stop signal waits until it is complete
        self.put_off: int = 0  #: the stop signal that arrived during this time

    def progress(self, fraction: float, message: str) -> None:
        inside = min(1.0, float(fraction)) if fraction > 0 else 0.0  # NaN is not greater than 0
        self._write(json.dumps({"progress": round(inside, 3), "message": str(message)[:MESSAGE_LIMIT]}))

    def result(self, value: dict[str, Any]) -> None:
        """Print the result. Raises `BusinessError` if it cannot be stored."""
        try:
            line = json.dumps({"result": value}, allow_nan=False)
        except (TypeError, ValueError, RecursionError) as error:
            raise BusinessError(f"The result cannot be written as JSON: {error}") from error
        if len(line) > RESULT_LIMIT:
            raise BusinessError(f"The result has {len(line):,} bytes, more than the {RESULT_LIMIT:,} that are kept.")
        self.sending_result = True
        self._write(line)
        self.result_sent, self.sending_result = True, False
        if self.put_off:
            os.kill(os.getpid(), self.put_off)

    def _write(self, line: str) -> None:
        """Write without a buffer, so that a signal finds no partial line."""
        data = line.encode() + b"\n"
        try:
            while data:
                data = data[os.write(self._descriptor, data) :]
        except BrokenPipeError:
            return  # the reader has ended


# Browser of a flow: one opened for a manual trial, and the tab of each run.
#
# Workers give flows the browsers of their pool instead.


START_TIMEOUT = 30.0  #: seconds
CLOSE_TIMEOUT = 5.0  #: seconds to store its data before it is killed


@contextmanager
def open_browser(profile: Path | None = None, *, show: bool = False) -> Iterator[int]:
    """Start a Chromium, yield its debug port, and close it at the end. Without a profile it has no logins.

    Raises: `Misused` if there is no Chromium or it does not start.
    """
    try:
        program = find_program(os.environ.get("RPA_CHROMIUM_PATH", ""))
    except NoProgram as error:
        raise Misused(error.detail) from None
    with TemporaryDirectory(prefix="flow-profile-", ignore_cleanup_errors=True) as passing:
        folder = (profile or Path(passing)).absolute()
        folder.mkdir(parents=True, exist_ok=True)
        words = [program, *COMMON_FLAGS, f"--user-data-dir={folder}", *([] if show else ["--headless=new"])]
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
                f"http://{devtools.HOST}:{self._port}", timeout=CONNECT_TIMEOUT * 1000
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
        request = f"GET /json/close/{self._id} HTTP/1.1\r\nHost: {devtools.HOST}\r\nConnection: close\r\n\r\n"
        try:
            with socket.create_connection((devtools.HOST, self._port), CLOSING_TIMEOUT) as connection:
                connection.sendall(request.encode())
                connection.recv(1)
        except OSError:
            return


#: By name: accepted types, their description, and the default.
PARAM_FIELDS: Mapping[str, tuple[type | tuple[type, ...], str, Any]] = {
    "shop_id": (str, "a string", None),
    "platform": (str, "a string", ""),
    "profile_id": (str, "a string", ""),
    "task_id": (str, "a string", ""),
    "delivery_key": (str, "a string", ""),
    "lease_no": (int, "a whole number", 0),
    "debug_port": ((int, type(None)), "a port number or null", None),
    "payload": (dict, "an object", {}),
}
HIGHEST_PORT = 65_535


@dataclass(slots=True, kw_only=True)
class Flow:
    """One run. `page` is a new tab in the shop's own browser, with the shop's logins."""

    shop_id: str
    platform: str
    profile_id: str
    #: The job. Constant over its retries.
    task_id: str
    #: The same for a job and for every job that was published again in its place: an idempotency key.
    delivery_key: str
    #: Increased by each run of the shop. Store it with your data, and refuse to overwrite data with a higher one.
    lease_no: int
    payload: dict[str, Any]
    #: Seconds.
    timeout: float
    tab: Tab
    wire: Wire

    @property
    def page(self) -> Page:
        """Return the tab. Raises `Misused` if the job has no browser, `Transient` if the browser does not answer."""
        return self.tab.page

    @property
    def browser(self) -> Browser:
        """Return the shop's browser; its only context has the shop's cookies. Raises like `page`."""
        return self.tab.browser

    def text(self, name: str) -> str:
        """Return a required text of the payload. Raises `BusinessError` if it is missing or empty."""
        value = self.payload.get(name)
        if not isinstance(value, str) or not value.strip():
            raise BusinessError(f"payload: {name} must be a text that is not empty.")
        return value

    def progress(self, fraction: float, message: str = "") -> None:
        """Report the progress, between 0 and 1, which is shown with the job."""
        self.wire.progress(fraction, message)


def read_param(text: str) -> dict[str, Any]:
    """Return the fields of `--param`, checked for their types.

    Without a member `payload` all unknown members are the payload: both styles of `Flow.param_style` are accepted.

    Raises: `Misused`. The message contains no value, as a payload may be secret.
    """
    try:
        given = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise Misused(f"--param is not JSON: {error}") from None
    if not isinstance(given, dict):
        raise Misused("--param must be a JSON object.")
    if "payload" not in given:
        given["payload"] = {name: value for name, value in given.items() if name not in PARAM_FIELDS}
    read = {name: _checked_field(given, name) for name in PARAM_FIELDS}
    if read["debug_port"] is not None and not 0 < read["debug_port"] <= HIGHEST_PORT:
        raise Misused("--param: debug_port must be between 1 and 65535.")
    return read


def _checked_field(given: Mapping[str, Any], name: str) -> Any:
    fitting, wanted, otherwise = PARAM_FIELDS[name]
    if name not in given:
        if name == "shop_id":
            raise Misused("--param: shop_id is missing.")
        return otherwise
    value = given[name]
    if not isinstance(value, fitting) or isinstance(value, bool):
        raise Misused(f"--param: {name} must be {wanted}.")
    return value


# End the process before the flow ends: by a signal, or after its timeout.
#
# The process exits inside the signal handler. An exception there would leave Playwright's event loop broken, and the
# flow's own clean-up would wait on it forever. Write data in a transaction: the server rolls an unfinished one back
# when the connection breaks.


#: Seconds after the timeout until a run ends itself, if no other process does.
OVERTIME = 5.0
#: A SIGTERM less than this many seconds before the timeout counts as the timeout: the sender's clock started earlier.
TIMEOUT_TOLERANCE = 3.0
#: Seconds for an orderly exit after the end of the flow.
CLEANUP_SECONDS = 5.0

EXIT_CODES = {signal.SIGTERM: TERMINATED, signal.SIGINT: INTERRUPTED, signal.SIGALRM: TIMED_OUT}


class Stop:
    """Handles stop signals and the timeout from its construction on."""

    def __init__(self, tab: Tab, wire: Wire, timeout: float) -> None:
        self._tab, self._wire = tab, wire
        self._timeout_at = time.monotonic() + timeout
        self._code: int | None = None
        for number in EXIT_CODES:
            signal.signal(number, self._handle_signal)
        signal.setitimer(signal.ITIMER_REAL, timeout + OVERTIME)

    def expect_end(self, code: int) -> None:
        """Fix the exit status after the end of the flow, whatever happens during the cleanup."""
        self._code = code
        signal.setitimer(signal.ITIMER_REAL, CLEANUP_SECONDS)

    def _handle_signal(self, number: int, frame: FrameType | None) -> None:
        if self._wire.sending_result:
            self._wire.put_off = number
        else:
            self._end(number)

    def _end(self, number: int) -> NoReturn:
        for each in EXIT_CODES:
            signal.signal(each, signal.SIG_IGN)
        code = self._code
        if code is None:
            # The effect took place and was reported: a later signal does not change that.
            code = 0 if self._wire.result_sent else EXIT_CODES[signal.Signals(number)]
            if number == signal.SIGALRM:
                message = "The flow's time is over.\n"
            else:
                message = f"The flow was stopped by {signal.Signals(number).name}.\n"
            os.write(2, message.encode())
            # At the timeout the page shows what it was waiting for, and stays open as evidence.
            if time.monotonic() < self._timeout_at - TIMEOUT_TOLERANCE:
                self._tab.close_from_outside()
        os._exit(code)
