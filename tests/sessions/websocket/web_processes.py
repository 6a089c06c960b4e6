"""Clients of the WebSockets of a real web process."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from time import monotonic
from typing import Any
from urllib.parse import quote

import pytest
from websockets.exceptions import ConnectionClosed
from websockets.sync.client import ClientConnection, connect

from sessions import tokens
from tests.scheduling.api.serving import serving
from tests.support.waiting import WAIT_LIMIT


@contextmanager
def web(**environ: str) -> Iterator[str]:
    """A web process; yields its address without the scheme."""
    with serving(**environ) as address:
        yield address.removeprefix("http://")


def token(session: str = "s1", user: str = "ann", role: str = "user", *, seconds: float = 600, **more: str) -> str:
    admission = tokens.Admission(session, user, more.get("chat_id", "c1"), more.get("tag", ""), role)
    return tokens.issue_token(admission, timedelta(seconds=seconds))[0]


class Page:
    """One side of a session, as a page or a gateway would be."""

    def __init__(self, address: str, session: str = "s1", role: str = "user", **more: Any) -> None:
        cursor, given, origin = more.pop("cursor", ""), more.pop("token", None), more.pop("origin", None)
        secret = token(session, role=role, **more) if given is None else given
        query = f"token={quote(secret)}" + (f"&cursor={cursor}" if cursor else "")
        url = f"ws://{address}/ws/v1/sessions/{quote(session, safe='')}?{query}"
        self.address = address
        # Without a bound of its queue: a full one stops the reading, and the closing waits 10 s for an answer.
        self.socket: ClientConnection = connect(
            url, origin=origin, open_timeout=WAIT_LIMIT, compression=None, max_queue=None
        ).__enter__()

    def __enter__(self) -> Page:
        return self

    def __exit__(self, *_: object) -> None:
        self.socket.close()

    @classmethod
    def is_accepted(cls, address: str, secret: str) -> bool:
        with cls(address, token=secret) as page:
            try:
                return page.receive()["type"] == "welcome"
            except ConnectionClosed:
                return False

    def send_frame(self, type: str, **more: Any) -> None:
        self.socket.send(json.dumps({"type": type, **more}))

    def receive(self, timeout: float = WAIT_LIMIT) -> dict[str, Any]:
        return json.loads(self.socket.recv(timeout))

    def receive_until(self, type: str, **wanted: Any) -> dict[str, Any]:
        """Return the next frame of this type and content; skip others."""
        ends_at = monotonic() + WAIT_LIMIT
        while True:
            frame = self.receive(max(0.0, ends_at - monotonic()))
            if frame["type"] == type and all(frame.get(name) == value for name, value in wanted.items()):
                return frame

    def received_frames(self) -> list[dict[str, Any]]:
        """What came before the answer to a ping that is sent now."""
        self.send_frame("ping")
        found = []
        while (frame := self.receive())["type"] != "pong":
            found.append(frame)
        return found

    def close_code(self) -> tuple[int, str]:
        """Wait for the server to close it; skip earlier frames."""
        ends_at = monotonic() + WAIT_LIMIT
        with pytest.raises(ConnectionClosed) as closed:
            self._pass_over(ends_at)
        assert closed.value.rcvd is not None, "no close frame came"
        return closed.value.rcvd.code, closed.value.rcvd.reason

    def _pass_over(self, ends_at: float) -> None:
        while True:
            self.socket.recv(max(0.0, ends_at - monotonic()))
