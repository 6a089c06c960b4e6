"""The web process for tests, with the time limits of a slow machine."""

from __future__ import annotations

import os

from config import http_protocol
from config.asgi import application
from sessions.websocket import connection
from tests.support.longer_limits import raise_time_limits

__all__ = ["application"]

raise_time_limits("event_lock")  # the API answers within 10 s
http_protocol.DISCARD_WITHIN = 60.0  # a client that stalls still sends the body that was refused
connection.END_WITHIN = float(os.environ.get("TEST_END_WITHIN", "120"))  # a test that stalls reads the close frame late
