"""DevTools commands of the pool: identify, show, close pages, read cookies, close the browser.

It uses HTTP where possible, otherwise one WebSocket per command. All connections go to the loopback, without a proxy.
"""

from __future__ import annotations

import json
import re
import socket
import time
from base64 import b64decode
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from http.client import HTTPConnection, HTTPException
from threading import Timer
from typing import Any, NamedTuple, TypeVar
from urllib.parse import quote

from websockets.exceptions import WebSocketException
from websockets.sync.client import ClientConnection, connect

HOST = "127.0.0.1"
TIMEOUT = 3.0  #: seconds, unless the caller gives a timeout
LONGEST_LIST = 1_000_000  #: bytes of an answer by HTTP
LONGEST_ANSWER = 32 * 2**20  #: bytes; a hostile page chooses the size of its picture
CLOSE_TIMEOUT = 2.0  #: seconds for pages to close; a page with a leave confirmation stays


@contextmanager
def reserve_port() -> Iterator[int]:
    """Reserve a free debug port for a browser that starts in the block.

    The socket is bound but does not listen. So the kernel gives its port to no other process, and Chromium, which
    reuses addresses, can listen on it. A port that Chromium chooses is unknown when the origins are named.
    """
    with socket.socket() as reserved:
        reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        reserved.bind((HOST, 0))
        yield reserved.getsockname()[1]


def debug_flags(port: int) -> list[str]:
    """Return the flags of a browser with this debug port.

    Some clients send the address that they connect to as their origin, which Chromium refuses unless it is named. Pages
    send their own origin, so none of them reaches the port.
    """
    origins = ",".join(f"http://{host}:{port}" for host in (HOST, "localhost"))
    return [f"--remote-debugging-port={port}", f"--remote-allow-origins={origins}"]


class NoAnswer(Exception):
    """The browser did not answer in time, or gave an odd answer, as another program does."""


class Refused(NoAnswer):
    """The browser answered in time that it does not carry out the command."""


T = TypeVar("T")


def _member(answer: object, kind: type[T], *path: str) -> T:
    """Return what the answer has at this path. Raises `NoAnswer` if that is missing or of another kind.

    All answers are read by it: a browser that runs elsewhere may be any program.
    """
    for name in path:
        answer = answer.get(name) if isinstance(answer, dict) else None
    if not isinstance(answer, kind):
        raise NoAnswer(f"odd answer, without {'.'.join(path) or kind.__name__}")
    return answer


def _parse_answer(text: str | bytes) -> object:
    try:
        answer: object = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise NoAnswer(f"odd answer, no JSON: {error!r}") from error
    return answer


def websocket_path(port: int, *, timeout: float | None = None) -> str:
    """Return the path of the browser's own WebSocket, with its random part. Raises `NoAnswer`."""
    answer = _parse_answer(_request_http(port, "/json/version", TIMEOUT if timeout is None else timeout))
    found = re.fullmatch(r"wss?://[^/]+(/[!-~]*)", _member(answer, str, "webSocketDebuggerUrl"))
    if not found:
        raise NoAnswer("odd answer, without the address of a WebSocket")
    return found[1]


class Tab(NamedTuple):
    id: str
    url: str


def list_tabs(port: int) -> list[Tab]:
    """Return the tabs, the latest first. Raises `NoAnswer`."""
    targets = _member(_parse_answer(_request_http(port, "/json/list", TIMEOUT)), list)
    pages = [target for target in targets if _member(target, str, "type") == "page"]
    return [Tab(_member(page, str, "id"), _member(page, str, "url")) for page in pages]


def open_tab(port: int, url: str, *, timeout: float | None = None) -> str:
    """Open the page in a new tab and return its id. Raises `NoAnswer`."""
    path = f"/json/new?{quote(url, safe='')}"
    answer = _request_http(port, path, TIMEOUT if timeout is None else timeout, method="PUT")
    return _member(_parse_answer(answer), str, "id")


def _close_tab(port: int, tab: str, *, timeout: float | None = None) -> None:
    with suppress(NoAnswer):
        _request_http(port, f"/json/close/{tab}", TIMEOUT if timeout is None else timeout)


def reset_to_blank_page(port: int) -> bool:
    """Close the pages that a run left open, so that none works or fills memory during the next run.

    Returns False if a page does not close. Raises `NoAnswer`.
    """
    open_tabs = list_tabs(port)
    if [tab.url for tab in open_tabs] == ["about:blank"]:
        return True
    open_tab(port, "about:blank")  # first: a browser without a page may exit
    ends_at = time.monotonic() + CLOSE_TIMEOUT  # for all together: an odd browser lists thousands
    for tab in open_tabs:
        if (left := ends_at - time.monotonic()) <= 0:
            break
        _close_tab(port, tab.id, timeout=left)
    old = {tab.id for tab in open_tabs}
    while not (closed := old.isdisjoint(tab.id for tab in list_tabs(port))) and time.monotonic() < ends_at:
        time.sleep(0.02)
    return closed


def open_connection(port: int, path: str, *, timeout: float | None = None) -> ClientConnection:
    """Connect to a WebSocket of the browser. Raises `NoAnswer`."""
    try:
        return connect(
            f"ws://{HOST}:{port}{path}",
            proxy=None,
            compression=None,
            max_size=LONGEST_ANSWER,
            open_timeout=TIMEOUT if timeout is None else timeout,
            close_timeout=0.2,
            ping_interval=None,  # a browser that is busy for long keeps a connection
        )
    except (OSError, ValueError, RuntimeError, WebSocketException) as error:  # a connection needs a new thread
        raise NoAnswer(f"{path}: {error!r}") from error


def ask(connection: ClientConnection, method: str, *, timeout: float | None = None, **params: Any) -> dict[str, Any]:
    """Send one command and return its result. Raises `NoAnswer`, also if the browser refuses it."""
    ends_at = time.monotonic() + (TIMEOUT if timeout is None else timeout)
    try:
        connection.send(json.dumps({"id": 1, "method": method, "params": params}))
        while (left := ends_at - time.monotonic()) > 0:  # a frame that already waits is received whatever the timeout
            answer = _member(_parse_answer(connection.recv(timeout=left)), dict)
            # Else it is an event. An error without an id is the answer to a command that the browser cannot parse.
            if answer.get("id") == 1 or "error" in answer:
                break
        else:
            raise NoAnswer(f"{method}: only events in time")
    except (OSError, ValueError, WebSocketException) as error:
        raise NoAnswer(f"{method}: {error!r}") from error
    if "error" in answer:
        raise Refused(f"{method}: {answer['error']!r}")
    return _member(answer, dict, "result")


def send_command(port: int, path: str, method: str, *, timeout: float | None = None, **params: Any) -> dict[str, Any]:
    """Send one command over a connection of its own. Raises `NoAnswer`, also if the browser refuses it."""
    with open_connection(port, path, timeout=timeout) as connection:
        return ask(connection, method, timeout=timeout, **params)


def list_cookies(port: int, path: str, *, timeout: float | None = None) -> list[dict[str, Any]]:
    """Return the cookies of the profile; each has name, domain, path and `session`. Raises `NoAnswer`."""
    cookies = _member(send_command(port, path, "Storage.getCookies", timeout=timeout), list, "cookies")
    for cookie in cookies:
        for name, kind in {"name": str, "domain": str, "path": str, "session": bool}.items():
            _member(cookie, kind, name)
    return cookies


PAGE_STATE = """(() => {
    const entry = performance.getEntriesByType("navigation")[0];
    const body = document.body ? document.body.innerText : "";
    return {
        url: location.href, state: document.readyState, status: entry ? entry.responseStatus : 0,
        text: body.slice(0, 10000),
    };
})()"""


def read_page(port: int, url: str, *, timeout: float) -> tuple[int, str]:
    """Open a page in a tab of its own. Returns its status, 0 if it was not loaded, and text. Raises `NoAnswer`."""
    ends_at = time.monotonic() + timeout
    tab = open_tab(port, url, timeout=timeout)
    try:
        while time.monotonic() < ends_at:
            answer = send_command(
                port, f"/devtools/page/{tab}", "Runtime.evaluate", timeout=max(0.0, ends_at - time.monotonic()),
                expression=PAGE_STATE, returnByValue=True,
            )  # fmt: skip
            if "value" in (page := _member(answer, dict, "result")):  # else the tab is between two pages
                address = _member(page, str, "value", "url")
                if _member(page, str, "value", "state") == "complete" and address != "about:blank":
                    status = 0 if address.startswith("chrome-error:") else _member(page, int, "value", "status")
                    return status, _member(page, str, "value", "text")
            time.sleep(0.05)
    finally:
        _close_tab(port, tab)
    raise NoAnswer(f"{url} was not loaded in {timeout:.0f} s")


PAGE_HTML = "document.documentElement.outerHTML.slice(0, %d)"
#: The first of these whose screenshot is within the limit is used.
PICTURES: tuple[dict[str, Any], ...] = (
    {"format": "png"},
    {"format": "jpeg", "quality": 70},
    {"format": "jpeg", "quality": 20},
)


class Snapshot(NamedTuple):
    """The most recent page."""

    screenshot: bytes
    html: str


def take_snapshot(port: int, *, timeout: float, limit: int) -> Snapshot:
    """Return the page that was active last, with at most `limit` bytes of screenshot and characters of HTML.

    Raises: `NoAnswer`, also for a page that does not answer, such as one with an endless script.
    """
    ends_at = time.monotonic() + timeout
    tab = min(list_tabs(port), key=lambda tab: tab.url == "about:blank", default=None)
    if tab is None:
        raise NoAnswer("The browser has no page.")
    with open_connection(port, f"/devtools/page/{tab.id}", timeout=timeout) as page:

        def ask_page(method: str, **params: Any) -> dict[str, Any]:
            return ask(page, method, timeout=max(0.0, ends_at - time.monotonic()), **params)

        # In a world of its own, where the page cannot have replaced what the expression uses.
        frame = _member(ask_page("Page.getFrameTree"), str, "frameTree", "frame", "id")
        world = _member(ask_page("Page.createIsolatedWorld", frameId=frame), int, "executionContextId")
        answer = ask_page("Runtime.evaluate", expression=PAGE_HTML % limit, contextId=world, returnByValue=True)
        html = _member(answer, dict, "result")
        for form in PICTURES:
            try:
                picture = b64decode(_member(ask_page("Page.captureScreenshot", **form), str, "data"))
            except ValueError as error:
                raise NoAnswer(f"odd answer, no picture: {error!r}") from error
            if len(picture) <= limit:
                break
    # A page without HTML has no value.
    return Snapshot(picture if len(picture) <= limit else b"", _member(html.get("value", ""), str))


def _request_http(port: int, path: str, timeout: float, *, method: str = "GET") -> bytes:
    connection = HTTPConnection(HOST, port, timeout=timeout)

    def end_answer(connected: socket.socket) -> None:
        with suppress(OSError):  # it has just ended
            connected.shutdown(socket.SHUT_RDWR)

    ender: Timer | None = None
    try:
        connection.request(method, path)
        # The timeout of a socket limits one read. An answer that arrives byte by byte takes many.
        ender = Timer(timeout, end_answer, [connection.sock])
        ender.start()
        response = connection.getresponse()
        if response.status != 200:
            raise NoAnswer(f"{path}: status {response.status}")
        return response.read(LONGEST_LIST)
    except (OSError, HTTPException, ValueError) as error:
        raise NoAnswer(f"{path}: {error!r}") from error
    finally:
        if ender:
            ender.cancel()
        connection.close()
