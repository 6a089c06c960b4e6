"""Flower is closed by default, and administrators of the back office need no second login."""

import base64
import os
import subprocess
import sys

from django.conf import settings
from django.test import Client
from django.urls import reverse

from config.celery.application import require_flower_login
from tests.support.waiting import WAIT_LIMIT


def test_flower_without_login_does_not_start():
    environ = {name: value for name, value in os.environ.items() if not name.startswith("FLOWER_")}
    words = [sys.executable, "-m", "celery", "-A", "config", "flower", "--address=127.0.0.1", "--port=0"]
    done = subprocess.run(words, cwd=settings.BASE_DIR, env=environ, capture_output=True, text=True, timeout=WAIT_LIMIT)
    assert done.returncode == 1
    assert "Flower needs a login" in done.stderr


def test_require_flower_login_accepts_login_and_other_programs():
    require_flower_login(["celery", "-A", "config", "flower", "--basic-auth=a:b"], {})
    require_flower_login(["celery", "-A", "config", "flower"], {"FLOWER_BASIC_AUTH": "a:b"})
    require_flower_login(["celery", "-A", "config", "worker"], {})
    require_flower_login(["/house/.venv/bin/pytest", "-k", "flower"], {})


def test_open_flower_redirects_administrators_only(as_member, settings):
    settings.FLOWER_LOGIN, link = "ops:a:b@c", reverse("flower")
    admin = as_member("admin")
    for url, address in (
        ("http://127.0.0.1:5555/", "http://ops:a%3Ab%40c@127.0.0.1:5555/"), ("/flower/", "/flower/"),
    ):  # fmt: skip
        settings.FLOWER_URL = url
        answer = admin.get(link)
        assert (answer.status_code, answer["Location"]) == (302, address)
        assert "no-store" in answer["Cache-Control"]
    assert as_member("editor").get(link).status_code == 403
    assert Client().get(link)["Location"].startswith(reverse("admin:login"))


def test_gate_gives_flower_login_to_administrators_only(as_member, settings):
    settings.FLOWER_LOGIN = "ops:hush"
    gate, login = reverse("administrators"), "Basic " + base64.b64encode(b"ops:hush").decode()
    admin = as_member("admin")
    answer = admin.get(gate)
    assert (answer.status_code, answer["X-Flower-Authorization"]) == (204, login)
    for client, status in ((as_member("editor"), 403), (Client(), 401)):
        answer = client.get(gate)
        assert answer.status_code == status
        assert "X-Flower-Authorization" not in answer
    settings.FLOWER_LOGIN = ""
    assert "X-Flower-Authorization" not in admin.get(gate)


def test_menu_links_flower_for_administrators_only(as_member, settings):
    settings.FLOWER_LOGIN = "ops:hush"
    link = f'href="{reverse("flower")}"'
    admin = as_member("admin")
    page = admin.get(reverse("admin:password_change")).content.decode()
    assert link in page
    assert "hush" not in page
    assert link not in as_member("editor").get(reverse("admin:password_change")).content.decode()
    settings.FLOWER_LOGIN = ""
    assert link not in admin.get(reverse("admin:password_change")).content.decode()
