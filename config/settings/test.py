"""What the tests run with: real servers, nothing eager, nothing mocked."""

from __future__ import annotations

from config.settings.base import *  # noqa: F403
from config.settings.base import STATIC_ROOT

ALLOWED_HOSTS = ["*"]
AFTERTOUCH_DEMO = True
STATIC_ROOT.mkdir(parents=True, exist_ok=True)
PASSWORD_HASHERS = ["django.contrib.auth.hashers.MD5PasswordHasher"]
# Commands of tests write where only we may; `tests/rpa_tasks/isolation` confines its own.
AFTERTOUCH_RPA_ISOLATION = "none"
# A test process has its figures to itself.
AFTERTOUCH_METRICS_DIR = None
