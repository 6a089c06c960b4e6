"""Test settings: real servers, no eager tasks, no mocks."""

from __future__ import annotations

from config.settings.base import *  # noqa: F403
from config.settings.base import INSTALLED_APPS, STATIC_ROOT

ALLOWED_HOSTS = ["*"]
AFTERTOUCH_DEMO = True
INSTALLED_APPS = [*INSTALLED_APPS, "examples.demo_chat"]
STATIC_ROOT.mkdir(parents=True, exist_ok=True)
PASSWORD_HASHERS = ["django.contrib.auth.hashers.MD5PasswordHasher"]
# Commands of tests write to private folders. `tests/rpa_tasks/isolation` isolates its own commands.
AFTERTOUCH_RPA_ISOLATION = "none"
# A test process does not share its metrics.
AFTERTOUCH_METRICS_DIR = None
