"""The few words the pool itself speaks to a browser: who are you, close your pages, clear cookies, end.

HTTP for what HTTP can, one WebSocket a command for the rest. Everything goes to the loopback, never through a proxy.
"""

from __future__ import annotations

import json
import time
from contextlib import suppress
from http.client import HTTPConnection, HTTPException
from typing import Any
from urllib.parse import urlsplit

from websockets.exceptions import WebSocketException
from websockets.sync.client import connect

HOST = "127.0.0.1"
TIMEOUT = 3.0  #: seconds, unless the caller says otherwise
CLOSING = 2.0  #: seconds for pages to go; one that asks whether it may be left stays


class NoAnswer(Exception):
    """The browser did not answer in time, or not as a browser does."""


def address(port: int, *, timeout: float | None = None) -> str:
    """The path of the browser's own WebSocket, with its random part. NoAnswer."""
    answer = _get(port, "/json/version", TIMEOUT if timeout is None else timeout)
    if not isinstance(answer, dict) or not isinstance(url := answer.get("webSocketDebuggerUrl"), str):
        raise NoAnswer(f"Port {port} answers, but not as a browser.")
    return urlsplit(url).path


def pages(port: int) -> list[dict[str, Any]]:
    """Its tabs, the latest first. NoAnswer."""
    answer = _get(port, "/json/list", TIMEOUT)
    if not isinstance(answer, list):
        raise NoAnswer(f"Port {port} answers, but not as a browser.")
    return [page for page in answer if page.get("type") == "page"]


def leave_one_blank_page(port: int) -> bool:
    """Close what a run left open, so that no page goes on working, or fills memory, behind the next run's back. False:
    a page would not go. NoAnswer."""
    open_pages = pages(port)
    if [page["url"] for page in open_pages] == ["about:blank"]:
        return True
    _get(port, "/json/new?about:blank", TIMEOUT, method="PUT")  # first: a browser without a page may end itself
    for page in open_pages:
        with suppress(NoAnswer):
            _get(port, f"/json/close/{page['id']}", TIMEOUT, text=True)
    old = {page["id"] for page in open_pages}
    ends_at = time.monotonic() + CLOSING
    while not (closed := old.isdisjoint(page["id"] for page in pages(port))) and time.monotonic() < ends_at:
        time.sleep(0.02)
    return closed


def call(port: int, path: str, method: str, *, timeout: float | None = None, **params: Any) -> dict[str, Any]:
    """One command to the browser itself. NoAnswer, also where it refuses."""
    timeout = TIMEOUT if timeout is None else timeout
    try:
        with connect(
            f"ws://{HOST}:{port}{path}",
            proxy=None,
            compression=None,
            max_size=None,
            open_timeout=timeout,
            close_timeout=0.2,
        ) as socket:
            socket.send(json.dumps({"id": 1, "method": method, "params": params}))
            while (answer := json.loads(socket.recv(timeout=timeout))).get("id") != 1:
                pass  # an event
    except (OSError, ValueError, WebSocketException) as error:
        raise NoAnswer(f"{method}: {error!r}") from error
    if "error" in answer:
        raise NoAnswer(f"{method}: {answer['error']}")
    return dict(answer["result"])


def clear_cookies(port: int) -> None:
    """Forget every cookie of the profile. NoAnswer."""
    call(port, address(port), "Storage.clearCookies")


def _get(port: int, path: str, timeout: float, *, method: str = "GET", text: bool = False) -> Any:
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
