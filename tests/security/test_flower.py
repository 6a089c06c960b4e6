"""Flower is nobody's by default."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
from django.conf import settings

from config.celery.application import require_flower_login


def test_flower_without_login_does_not_start() -> None:
    environ = {name: value for name, value in os.environ.items() if not name.startswith("FLOWER_")}
    words = [sys.executable, "-m", "celery", "-A", "config", "flower", "--address=127.0.0.1", "--port=0"]
    done = subprocess.run(words, cwd=settings.BASE_DIR, env=environ, capture_output=True, text=True, timeout=120)
    assert done.returncode == 1
    assert "Flower needs a login" in done.stderr


def test_require_flower_login_without_login_exits() -> None:
    for program in ("/house/.venv/bin/celery", "/house/site-packages/celery/__main__.py"):
        with pytest.raises(SystemExit):
            require_flower_login([program, "-A", "config", "flower"], {})


@pytest.mark.parametrize(
    ("words", "environ"),
    [
        (["celery", "-A", "config", "flower", "--basic-auth=a:b"], {}),
        (["celery", "-A", "config", "flower"], {"FLOWER_BASIC_AUTH": "a:b"}),
        (["celery", "-A", "config", "worker"], {}),
        (["/house/.venv/bin/pytest", "-k", "flower"], {}),
    ],
)
def test_require_flower_login_accepts_login_and_other_programs(words: list[str], environ: dict[str, str]) -> None:
    require_flower_login(words, environ)
