"""Settings of a developer's machine and the demo: embedded servers and a demo login.

`DJANGO_DEBUG=true` shows full errors. Django then stores every statement, which is slow.
"""

from __future__ import annotations

from config.settings.base import *  # noqa: F403
from config.settings.base import ENV, INSTALLED_APPS, STATIC_ROOT

DEBUG = ENV.django_debug
AFTERTOUCH_DEMO = True
FLOWER_URL = f"http://127.0.0.1:{ENV.aftertouch_flower_port}/"
if "aftertouch_rpa_ports" not in ENV.model_fields_set:
    AFTERTOUCH_RPA_PORTS = [(1, 32_767)]  # local servers take any free port
INSTALLED_APPS = [*INSTALLED_APPS, "examples.demo_chat"]
INTERNAL_IPS = ["127.0.0.1"]
STATIC_ROOT.mkdir(parents=True, exist_ok=True)
