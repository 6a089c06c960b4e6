"""DevTools commands of the pool: identify, show, close pages, clear cookies, close the browser.

It uses HTTP where possible, otherwise one WebSocket per command. All connections go to the loopback, without a proxy.
"""

from __future__ import annotations

import json
import socket
import time
from base64 import b64decode
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from http.client import HTTPConnection, HTTPException
from typing import Any
from urllib.parse import quote, urlsplit

from websockets.exceptions import WebSocketException
from websockets.sync.client import ClientConnection, connect

HOST = "127.0.0.1"
TIMEOUT = 3.0  #: seconds, unless the caller gives a timeout
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
    """The browser did not answer in time, or another program answered."""


def websocket_path(port: int, *, timeout: float | None = None) -> str:
    """Return the path of the browser's own WebSocket, with its random part. Raises `NoAnswer`."""
    answer = _request_http(port, "/json/version", TIMEOUT if timeout is None else timeout)
    if not isinstance(answer, dict) or not isinstance(url := answer.get("webSocketDebuggerUrl"), str):
        raise NoAnswer(f"Port {port} answers, but not as a browser.")
    return urlsplit(url).path


def list_tabs(port: int) -> list[dict[str, Any]]:
    """Return the tabs, the latest first. Raises `NoAnswer`."""
    answer = _request_http(port, "/json/list", TIMEOUT)
    if not isinstance(answer, list):
        raise NoAnswer(f"Port {port} answers, but not as a browser.")
    return [page for page in answer if page.get("type") == "page"]


def reset_to_blank_page(port: int) -> bool:
    """Close the pages that a run left open, so that none works or fills memory during the next run.

    Returns False if a page does not close. Raises `NoAnswer`.
    """
    open_pages = list_tabs(port)
    if [page["url"] for page in open_pages] == ["about:blank"]:
        return True
    _request_http(port, "/json/new?about:blank", TIMEOUT, method="PUT")  # first: a browser without a page may exit
    for page in open_pages:
        with suppress(NoAnswer):
            _request_http(port, f"/json/close/{page['id']}", TIMEOUT, text=True)
    old = {page["id"] for page in open_pages}
    ends_at = time.monotonic() + CLOSE_TIMEOUT
    while not (closed := old.isdisjoint(page["id"] for page in list_tabs(port))) and time.monotonic() < ends_at:
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
    except (OSError, WebSocketException) as error:
        raise NoAnswer(f"{path}: {error!r}") from error


def ask(connection: ClientConnection, method: str, *, timeout: float | None = None, **params: Any) -> dict[str, Any]:
    """Send one command. Raises `NoAnswer`, also if the browser refuses it."""
    timeout = TIMEOUT if timeout is None else timeout
    try:
        connection.send(json.dumps({"id": 1, "method": method, "params": params}))
        while (answer := json.loads(connection.recv(timeout=timeout))).get("id") != 1:
            pass  # an event
    except (OSError, ValueError, WebSocketException) as error:
        raise NoAnswer(f"{method}: {error!r}") from error
    if "error" in answer:
        raise NoAnswer(f"{method}: {answer['error']}")
    return dict(answer["result"])


def send_command(port: int, path: str, method: str, *, timeout: float | None = None, **params: Any) -> dict[str, Any]:
    """Send one command over a connection of its own. Raises `NoAnswer`, also if the browser refuses it."""
    with open_connection(port, path, timeout=timeout) as connection:
        return ask(connection, method, timeout=timeout, **params)


def clear_cookies(port: int) -> None:
    """Delete all cookies of the profile. Raises `NoAnswer`."""
    send_command(port, websocket_path(port), "Storage.clearCookies")


PAGE_STATE = """(() => {
    const entry = performance.getEntriesByType("navigation")[0];
    const body = document.body ? document.body.innerText : "";
    return [location.href, document.readyState, entry ? entry.responseStatus : 0, body.slice(0, 10000)];
})()"""


PAGE_HTML = "document.documentElement.outerHTML.slice(0, %d)"
#: The first of these whose screenshot is within the limit is used.
PICTURES: tuple[dict[str, Any], ...] = (
    {"format": "png"},
    {"format": "jpeg", "quality": 70},
    {"format": "jpeg", "quality": 20},
)


@contextmanager
def _refusing_odd_answers() -> Iterator[None]:
    """Raise `NoAnswer` for an answer without the expected members: a browser elsewhere may be any program."""
    try:
        yield
    except (LookupError, TypeError, AttributeError, ValueError) as error:
        raise NoAnswer(f"odd answer: {error!r}") from error


@_refusing_odd_answers()
def read_page(port: int, url: str, *, timeout: float) -> tuple[int, str]:
    """Open a page in a tab of its own. Returns its status, 0 if it was not loaded, and text. Raises `NoAnswer`."""
    ends_at = time.monotonic() + timeout
    tab = _request_http(port, f"/json/new?{quote(url, safe='')}", timeout, method="PUT")["id"]
    try:
        while time.monotonic() < ends_at:
            answer = send_command(
                port, f"/devtools/page/{tab}", "Runtime.evaluate", timeout=max(0.0, ends_at - time.monotonic()),
                expression=PAGE_STATE, returnByValue=True,
            )  # fmt: skip
            address, state, status, text = answer["result"].get("value") or ("", "", 0, "")
            if state == "complete" and address != "about:blank":
                return (0 if address.startswith("chrome-error:") else int(status)), text
            time.sleep(0.05)
    finally:
        with suppress(NoAnswer):
            _request_http(port, f"/json/close/{tab}", TIMEOUT, text=True)
    raise NoAnswer(f"{url} was not loaded in {timeout:.0f} s")


@dataclass(frozen=True, slots=True)
class Snapshot:
    """The most recent page."""

    screenshot: bytes
    html: str
    url: str
    title: str


@_refusing_odd_answers()
def take_snapshot(port: int, *, timeout: float, limit: int) -> Snapshot:
    """Return the page that was active last, with at most `limit` bytes of screenshot and characters of HTML.

    Raises: `NoAnswer`, also for a page that does not answer, such as one with an endless script.
    """
    tabs = list_tabs(port)
    if not tabs:
        raise NoAnswer("The browser has no page.")
    tab = min(tabs, key=lambda each: bool(each["url"] == "about:blank"))
    ends_at = time.monotonic() + timeout
    with open_connection(port, f"/devtools/page/{tab['id']}", timeout=timeout) as page:

        def ask_page(method: str, **params: Any) -> dict[str, Any]:
            return ask(page, method, timeout=max(0.0, ends_at - time.monotonic()), **params)

        # In a world of its own, where the page cannot have replaced what the expression uses.
        frame = ask_page("Page.getFrameTree")["frameTree"]["frame"]
        world = ask_page("Page.createIsolatedWorld", frameId=frame["id"])["executionContextId"]
        html = ask_page("Runtime.evaluate", expression=PAGE_HTML % limit, contextId=world, returnByValue=True)
        for form in PICTURES:
            picture = b64decode(ask_page("Page.captureScreenshot", **form)["data"])
            if len(picture) <= limit:
                break
    screenshot = picture if len(picture) <= limit else b""
    return Snapshot(screenshot, str(html["result"].get("value", "")), tab["url"], tab["title"])


def _request_http(port: int, path: str, timeout: float, *, method: str = "GET", text: bool = False) -> Any:
    connection = HTTPConnection(HOST, port, timeout=timeout)
    try:
        connection.request(method, path)
        response = connection.getresponse()
        body = response.read(1_000_000)
        if response.status != 200:
            raise NoAnswer(f"{path}: status {response.status}")
        return body if text else json.loads(body)
    except (OSError, HTTPException, ValueError) as error:
        raise NoAnswer(f"{path}: {error!r}") from error
    finally:
        connection.close()
