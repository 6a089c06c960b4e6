"""A developer's machine, and the demo: embedded servers, a demo login, readable errors."""

from __future__ import annotations

from config.settings.base import *  # noqa: F403

DEBUG = True
AFTERTOUCH_DEMO = True
INTERNAL_IPS = ["127.0.0.1"]
