"""Settings of a developer's machine and the demo: embedded servers and a demo login.

`DJANGO_DEBUG=true` shows full errors. Django then stores every statement, which is slow.
"""

from __future__ import annotations

from config.settings.base import *  # noqa: F403
from config.settings.base import ENV, INSTALLED_APPS, STATIC_ROOT

DEBUG = ENV.django_debug
AFTERTOUCH_DEMO = True
FLOWER_URL = f"http://127.0.0.1:{ENV.aftertouch_flower_port}/"
INSTALLED_APPS = [*INSTALLED_APPS, "examples.demo_chat"]
STATIC_ROOT.mkdir(parents=True, exist_ok=True)
