from __future__ import annotations

from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import pytest
import requests

from scheduling.management.commands.bootstrap import EVENT_TYPES
from scheduling.models import EventType, Scope
from scheduling.operations import commands
from sessions.models import SilencePolicy
from tests.scheduling.api.serving import Client
from tests.sessions.websocket.web_processes import Page, web
from tests.support.waiting import WAIT_LIMIT


@pytest.fixture
def initial_rows(transactional_db, valkey) -> None:
    """The initial event types. Without jitter each frame moves the deadline on."""
    SilencePolicy.objects.update(jitter=timedelta(0))
    EventType.objects.bulk_create(EventType(key=key, name=name, is_activity=own) for key, name, own in EVENT_TYPES)


@pytest.fixture(scope="session")
def address(web_process) -> str:
    """The address of the web process without the scheme."""
    return web_process.removeprefix("http://")


@pytest.fixture(scope="session")
def second_address(django_db_setup, django_db_blocker) -> Iterator[str]:
    """Another process. Pages of other origins than its shop's are refused there."""
    with django_db_blocker.unblock(), web(AFTERTOUCH_SOCKET_ORIGINS="https://Shop.example.com") as address:
        yield address


@pytest.fixture
def open_page(address, initial_rows) -> Iterator[Callable[..., Page]]:
    """Open one side of a session and wait until it is in."""
    opened: list[Page] = []

    def open_page(session: str = "s1", role: str = "user", *, welcome: bool = True, **more: Any) -> Page:
        opened.append(Page(address, session, role, **more))
        if welcome:
            assert opened[-1].receive()["type"] == "welcome"
        return opened[-1]

    yield open_page
    for each in opened:
        each.socket.close()
    if opened:  # what a connection or a frame still writes would come after the next test has emptied the server
        assert requests.get(f"http://{address}/test/no-sockets", timeout=WAIT_LIMIT).status_code == 204
        with Page(address, "last-session") as last:
            last.send_frame("message", text="x", id="last")
            last.receive_until("ack")


@pytest.fixture
def api(address, initial_rows) -> Client:
    return Client(f"http://{address}", commands.create_api_key("gateway", Scope.values))
