"""A browser that runs elsewhere may be any program: each odd answer of it is none, and nothing else fails."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from copy import deepcopy
from typing import Any
from unittest.mock import Mock

import pytest
from websockets.uri import parse_uri

from rpa_tasks.browsers import devtools
from tests.support.waiting import WAIT_LIMIT

Answers = dict[str, Any]
TABS = [{"id": "a", "type": "page", "url": "https://a.example/", "title": "A"}, {"id": "w", "type": "worker"}]
PAGE = {"url": "https://a.example/", "state": "complete", "status": 200, "text": "checked"}
#: What a browser answers, by path and by method.
GOOD: Answers = {
    "/json/version": {"webSocketDebuggerUrl": "ws://127.0.0.1:9/devtools/browser/x"},
    "/json/list": TABS,
    "/json/new": {"id": "b"},
    "/json/close": "Target is closing",
    "Runtime.evaluate": {"result": {"value": PAGE}},
    "Storage.getCookies": {
        "cookies": [{"name": "n", "domain": "a.example", "path": "/", "session": True, "value": "v"}]
    },
    "Page.getFrameTree": {"frameTree": {"frame": {"id": "f"}}},
    "Page.createIsolatedWorld": {"executionContextId": 1},
    "Page.captureScreenshot": {"data": "iVBORw=="},
}
HTML: Answers = {"Runtime.evaluate": {"result": {"value": "<html>"}}}
DEEP = "[" * 100_000
ODD = (None, True, 7, -1.5, "", "x", "\ud800", "\0", "ws://x@evil.example", "ws://[", [], [None], {}, {"id": 1})

#: Called with a timeout, s. A page is read until it ends.
READERS: dict[str, tuple[Answers, Callable[[float], Any]]] = {
    "path": (GOOD, lambda _: devtools.websocket_path(9)),
    "tabs": (GOOD, lambda _: devtools.list_tabs(9)),
    "reset": (GOOD, lambda _: devtools.reset_to_blank_page(9)),
    "page": (GOOD, lambda timeout: devtools.read_page(9, "https://a.example/", timeout=timeout)),
    "cookies": (GOOD, lambda _: devtools.list_cookies(9, "/devtools/browser/x")),
    "snapshot": (GOOD | HTML, lambda _: devtools.take_snapshot(9, timeout=1.0, limit=1_000)),
}


class Http:
    """Stands for `HTTPConnection`."""

    status = 200
    sock = Mock()  # under load the timer of the request shuts it down before the answer

    def __init__(self, answers: Answers) -> None:
        self._answers = answers

    def request(self, method: str, path: str) -> None:
        path.encode("ascii")  # as the library does
        self._path = "/".join(path.split("?")[0].split("/")[:3])

    def getresponse(self) -> Http:
        return self

    def read(self, most: int) -> bytes:
        answer = self._answers[self._path]
        return (DEEP if answer is DEEP else json.dumps(answer)).encode()

    def close(self) -> None:
        pass


class WebSocket:
    """Stands for a `ClientConnection`."""

    def __init__(self, answers: Answers) -> None:
        self._answers = answers

    def send(self, text: str) -> None:
        self._method = json.loads(text)["method"]

    def recv(self, timeout: float) -> str:
        answer = self._answers[self._method]
        return DEEP if answer is DEEP else json.dumps({"id": 1, "result": answer})


@pytest.fixture
def answer_with(monkeypatch: pytest.MonkeyPatch) -> Callable[[Answers], None]:
    def use(answers: Answers) -> None:
        def connect(url: str, **_: Any) -> AbstractContextManager[WebSocket]:
            parse_uri(url)  # as the library does
            return nullcontext(WebSocket(answers))

        monkeypatch.setattr(devtools, "HTTPConnection", lambda *_, **__: Http(answers))
        monkeypatch.setattr(devtools, "connect", connect)
        monkeypatch.setattr(devtools, "CLOSE_TIMEOUT", 0.0)

    return use


def spoil(value: Any) -> Iterator[Any]:
    """Yield copies of the value in which each part once is odd, or missing."""
    yield from ODD
    yield DEEP
    for name in value if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else ():
        for odd in spoil(value[name]):
            if odd is not DEEP:
                copy = deepcopy(value)
                copy[name] = odd
                yield copy
        copy = deepcopy(value)
        del copy[name]
        yield copy


@pytest.mark.parametrize("reader", READERS)
def test_odd_answers_are_no_answers(reader: str, answer_with: Callable[[Answers], None]) -> None:
    good, read = READERS[reader]
    answer_with(good)
    read(WAIT_LIMIT)
    failed = []
    for name, answer in good.items():
        for odd in spoil(answer):
            answer_with(good | {name: odd})
            try:
                read(0.01)
            except devtools.NoAnswer:
                pass
            except Exception as error:
                failed.append(f"{name} {str(odd)[:200]}: {error!r}")
    assert failed == []


def test_connection_without_a_thread_is_no_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each connection has a thread of its own."""

    def connect(url: str, **_: Any) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(devtools, "connect", connect)
    with pytest.raises(devtools.NoAnswer, match="can't start new thread"):
        devtools.open_connection(9, "/devtools/browser/x")
