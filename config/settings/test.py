"""What the tests run with: real servers, nothing eager, nothing mocked."""

from __future__ import annotations

from config.settings.base import *  # noqa: F403

ALLOWED_HOSTS = ["*"]
AFTERTOUCH_DEMO = True
PASSWORD_HASHERS = ["django.contrib.auth.hashers.MD5PasswordHasher"]
