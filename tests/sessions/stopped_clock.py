"""A server for whose scripts no time passes but what a test lets pass, however slow the machine is.

It refuses what only a cluster would refuse: a script that reads or writes a key which its call does not declare, and a
call whose keys do not all have one slot.
"""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import datetime
from typing import Any

import pytest
from django.conf import settings
from redis.crc import key_slot

from scheduling.redis_client import Script
from sessions.store.client import SCRIPTS, Call, Server, instant_of_ms
from tests.sessions.conftest import Chats

_ONLY_DECLARED_KEYS = """
local server, redis = redis, {}
function redis.call(name, key, ...)
  local declared = false
  for _, each in ipairs(KEYS) do declared = declared or each == key end
  if not declared then error('undeclared key ' .. tostring(key)) end
  return server.call(name, key, ...)
end
"""


def stop_clock(script: Script) -> Script:
    text = script.text.replace("redis.call('TIME')", "{0, 0}")
    assert text != script.text
    still = copy.copy(script)
    still.text = _ONLY_DECLARED_KEYS + text
    still.sha = hashlib.sha1(still.text.encode(), usedforsecurity=False).hexdigest()
    return still


class StoppedClockServer(Server):
    """`clock_offset` is the whole time."""

    scripts = {name: stop_clock(script) for name, script in SCRIPTS.items()}

    def run(self, calls: Sequence[Call], clock_offset: int = 0, *, partly: bool = False) -> list[Any]:
        for script, names, _words in calls:
            assert len({key_slot(name.encode()) for name in names}) == 1, (script, names)
        return super().run(calls, clock_offset, partly=partly)


class StoppedClockChats(Chats):
    """Stop their clock now."""

    def __init__(self, server: StoppedClockServer) -> None:
        super().__init__(server)
        seconds, micros = server.client.time()
        self.store.clock_offset = seconds * 1_000_000 + micros

    @property
    def now(self) -> datetime:
        return instant_of_ms(self.store.clock_offset // 1000)


@contextmanager
def stopped_chats(url: str) -> Iterator[Chats]:
    server = StoppedClockServer(url)
    yield StoppedClockChats(server)
    server.client.close()


@pytest.fixture
def chats(valkey) -> Iterator[Chats]:
    """Chats whose clock is stopped. A test module assigns it to `chats`."""
    with stopped_chats(settings.REDIS_URL) as made:
        yield made


@pytest.fixture
def chats_on_both(store_url) -> Iterator[Chats]:
    """The same, on one server and on a cluster."""
    with stopped_chats(store_url) as made:
        yield made
