"""Users with a second factor, and a provider to sign in at."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.error import URLError
from urllib.request import Request, urlopen

import pytest
from django.contrib.auth.models import User
from django.test import Client
from django.urls import reverse
from pytest_django import Settings

from config.local.processes import select_port, wait_until


@pytest.fixture
def ann(db: None, static_root: None) -> User:
    return User.objects.create_superuser("ann", "ann@example.com", "right")


def is_inside(client: Client) -> bool:
    return client.get(reverse("admin:account")).status_code == 200


class MockProvider:
    """The OpenID provider of oidc-provider-mock, in a process of its own."""

    def __init__(self, log: Path) -> None:
        port = select_port()
        self.url = f"http://127.0.0.1:{port}"
        command = [sys.executable, "-m", "oidc_provider_mock", "--port", str(port), "--require-nonce", "true"]
        with log.open("wb") as output:
            self.process = subprocess.Popen(command, stdout=output, stderr=output)
        assert wait_until(self.answers, 120), log.read_text()

    def answers(self) -> bool:
        try:
            return urlopen(f"{self.url}/jwks", timeout=60).status == 200  # type: ignore[no-any-return]
        except (URLError, OSError):
            return False

    def store_user(self, subject: str, **claims: Any) -> None:
        request = Request(f"{self.url}/users/{subject}", json.dumps(claims).encode(), method="PUT")
        request.add_header("Content-Type", "application/json")
        urlopen(request, timeout=60).close()

    def stop(self) -> None:
        self.process.kill()
        self.process.wait()


@pytest.fixture(scope="session")
def provider_process(tmp_path_factory: pytest.TempPathFactory) -> Iterator[MockProvider]:
    server = MockProvider(tmp_path_factory.mktemp("provider") / "log")
    yield server
    server.stop()


@pytest.fixture
def provider(provider_process: MockProvider, settings: Settings, static_root: None) -> MockProvider:
    settings.AFTERTOUCH_OIDC_ISSUER = provider_process.url
    settings.AFTERTOUCH_OIDC_CLIENT_ID = "aftertouch"
    settings.AFTERTOUCH_OIDC_CLIENT_SECRET = "its secret"
    settings.AFTERTOUCH_OIDC_GROUP_MAP = {"ops": "operator", "chiefs": "administrator"}
    settings.AFTERTOUCH_ALLOWED_PRIVATE_HOSTS = ["127.0.0.1"]
    settings.AFTERTOUCH_BASE_URL = "http://testserver"
    return provider_process
