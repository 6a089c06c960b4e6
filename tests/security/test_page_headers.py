"""Headers of responses to browsers, for every way of serving them."""

import os
import subprocess
import sys

import pytest
import requests
from django.conf import settings
from django.contrib.auth.models import User

from scheduling.web.middleware import NOT_A_PAGE
from tests.support.waiting import WAIT_LIMIT

pytestmark = [pytest.mark.django_db, pytest.mark.usefixtures("static_root")]

PAGES = ["/u/no-token", "/demo/chat/", "/admin/login/", "/api/v1/docs", "/no/such/page"]
FILES = ["/health/live", "/metrics", "/api/v1/touches", "/api/v1/openapi.json"]


def check(path, headers):
    policy = dict(part.strip().split(" ", 1) for part in headers["Content-Security-Policy"].split(";"))
    assert (policy["default-src"], policy["frame-ancestors"]) == ("'none'", "'none'"), path
    assert headers["X-Content-Type-Options"] == "nosniff", path
    assert headers["Referrer-Policy"] in ("no-referrer", "" if path.startswith("/u/") else "same-origin"), path
    assert "camera=()" in headers["Permissions-Policy"], path
    if path in FILES:
        assert headers["Content-Security-Policy"] == NOT_A_PAGE, path
        return
    assert policy["base-uri"] == "'none'"
    assert policy["form-action"] == "'self'"
    allowed = "'self' 'unsafe-eval'" if path.startswith("/admin/") else "'self'"
    assert policy["script-src"] == allowed, path


@pytest.mark.django_db(transaction=True)
def test_web_process_sends_security_headers(server):
    for path in [*PAGES, *FILES]:
        check(path, requests.get(server + path, timeout=WAIT_LIMIT).headers)


def test_admin_page_refuses_frames_and_sniffing(client):
    client.force_login(User.objects.create_superuser("ann"))
    answer = client.get("/admin/")
    check("/admin/", answer.headers)
    assert answer["X-Frame-Options"] == "DENY"
    assert answer["Cross-Origin-Opener-Policy"] == "same-origin"


PRODUCTION = """
import django; django.setup()
from django.test import Client
from django.conf import settings
from django.urls import Resolver404, resolve
client = Client(HTTP_HOST="aftertouch.example")
plain = client.get("/u/x")
assert plain.status_code == 301 and plain["Location"] == "https://aftertouch.example/u/x", plain
answer = client.get("/u/x", HTTP_X_FORWARDED_PROTO="https")
assert "max-age=31536000; includeSubDomains" in answer["Strict-Transport-Security"]
assert client.get("/u/x", HTTP_HOST="evil.example", HTTP_X_FORWARDED_PROTO="https").status_code == 400
assert settings.SESSION_COOKIE_SECURE and settings.CSRF_COOKIE_SECURE and settings.SESSION_COOKIE_HTTPONLY
assert settings.SESSION_COOKIE_SAMESITE == "Lax" and not settings.DEBUG
def is_served(path):
    try:
        return bool(resolve(path))
    except Resolver404:
        return False
assert is_served("/admin/")
assert not any(is_served(f"/demo/chat/{name}") for name in ("", "start", "state"))
"""


def in_production(state_dir, code, **changes):
    environ = {
        **os.environ,
        "DJANGO_SETTINGS_MODULE": "config.settings.production",
        "AFTERTOUCH_STATE_DIR": str(state_dir),
        "DATABASE_URL": "postgresql://nobody@127.0.0.1:1/none",
        "REDIS_URL": "redis://127.0.0.1:1/0",
        "DJANGO_SECRET_KEY": "0123456789abcdef" * 4,
        "DJANGO_ALLOWED_HOSTS": "aftertouch.example",
        "AFTERTOUCH_BASE_URL": "https://aftertouch.example",
        "AFTERTOUCH_SECRETS_KEYS": "0123456789abcdef" * 3,
        **changes,
    }
    (state_dir / "static").mkdir(exist_ok=True)
    command = [sys.executable, "-c", code]
    return subprocess.run(
        command, cwd=settings.BASE_DIR, env=environ, capture_output=True, text=True, timeout=WAIT_LIMIT
    )


def test_production_requires_tls_and_allowed_host_and_has_no_demo_chat(tmp_path):
    done = in_production(tmp_path, PRODUCTION)
    assert done.returncode == 0, done.stderr


def test_production_refuses_short_secrets_key(tmp_path):
    done = in_production(tmp_path, "import django; django.setup()", AFTERTOUCH_SECRETS_KEYS=f"{'s' * 44},short")
    assert done.returncode == 1
    assert "AFTERTOUCH_SECRETS_KEYS: each must have 32 random characters" in done.stderr
    assert "short" not in done.stderr.replace("each needs", "")
