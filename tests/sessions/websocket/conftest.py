from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import redis
from pytest_django import DjangoDbBlocker

from scheduling.management.commands.bootstrap import EVENT_TYPES
from scheduling.models import Configuration, EventType, Scope
from scheduling.operations import commands
from sessions.models import SilencePolicy
from tests.scheduling.api.serving import Client
from tests.sessions.websocket.web_processes import Page, web


@pytest.fixture
def initial_rows(transactional_db: None, valkey: redis.Redis) -> None:
    """Emptying the tables also removed the rows that migrations made. Event types are the initial ones."""
    Configuration.objects.get_or_create(pk=1)
    SilencePolicy.objects.get_or_create(key="default")
    EventType.objects.bulk_create(EventType(key=key, name=name, is_activity=own) for key, name, own in EVENT_TYPES)


@pytest.fixture(scope="session")
def address(django_db_setup: None, django_db_blocker: DjangoDbBlocker) -> Iterator[str]:
    with django_db_blocker.unblock(), web() as address:
        yield address


@pytest.fixture
def open_page(address: str, initial_rows: None) -> Iterator[Callable[..., Page]]:
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
    if opened:  # frames that still wait would be counted after the next test has emptied the server
        with Page(address, "last-session") as last:
            last.send_frame("message", text="x", id="last")
            last.receive_until("ack")


@pytest.fixture
def api(address: str, initial_rows: None) -> Client:
    return Client(f"http://{address}", commands.create_api_key("gateway", Scope.values))
