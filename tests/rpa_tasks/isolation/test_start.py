"""What a process must be given, or do, before it may run commands of flows."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from config.environment import ROOT
from tests.rpa_tasks.isolation.test_hostile_flow import HERE, ORDINARY

KEYS = {"DJANGO_SECRET_KEY": "k" * 20 + "0123456789" * 4 + "!", "AFTERTOUCH_SECRETS_KEYS": "abcdefghij" * 5}
PLACES = {
    "DATABASE_URL": "postgresql://x@127.0.0.1:1/x", "REDIS_URL": "redis://127.0.0.1:1/0",
    "DJANGO_ALLOWED_HOSTS": "a.example", "AFTERTOUCH_BASE_URL": "https://a.example",
    "DJANGO_SETTINGS_MODULE": "config.settings.production",
}  # fmt: skip
SETUP = "import django; django.setup(); "


def start(folder: Path, *words: str, ordinary: bool = False, **environment: str) -> Any:
    """Run Python with these words and only this environment."""
    starter = [sys.executable]
    if ordinary and os.geteuid() == 0:
        os.chown(folder, ORDINARY, ORDINARY)
        starter = [sys.executable, str(HERE / "unprivileged.py"), str(ORDINARY), sys.executable]
    given = {"PATH": "/usr/bin:/bin", "HOME": str(folder), "AFTERTOUCH_STATE_DIR": str(folder), "PYTHONPATH": str(ROOT)}
    return subprocess.run(
        [*starter, *words], cwd=ROOT, env=given | environment, capture_output=True, text=True, timeout=240, check=False
    )


@pytest.fixture
def folder(tmp_path_factory: pytest.TempPathFactory) -> Any:
    import shutil
    import tempfile

    made = Path(tempfile.mkdtemp(prefix="start-"))
    yield made
    shutil.rmtree(made, ignore_errors=True)


def test_production_process_environment_cannot_be_read(folder: Path) -> None:
    """A process of the same uid may open its parent's environment and memory only while the parent is dumpable."""
    look = "import os; print(open(f'/proc/{os.getppid()}/environ').read())"
    code = f"{SETUP}import subprocess, sys; sys.exit(subprocess.run([sys.executable, '-c', {look!r}]).returncode)"

    kept = start(folder, "-c", code, ordinary=True, **PLACES, **KEYS)
    shown = start(folder, "-c", code, ordinary=True, **PLACES | {"DJANGO_SETTINGS_MODULE": "config.settings.local"})

    assert "PermissionError" in kept.stderr
    assert "DJANGO_SETTINGS_MODULE" in shown.stdout


def test_execution_role_refuses_keys(folder: Path) -> None:
    code = f"{SETUP}from django.conf import settings; print(len(settings.SECRET_KEY))"
    places = {name: PLACES[name] for name in ("DATABASE_URL", "REDIS_URL", "DJANGO_SETTINGS_MODULE")}

    without = start(folder, "-c", code, AFTERTOUCH_ROLE="execution", **places)
    given = start(folder, "-c", code, AFTERTOUCH_ROLE="execution", **places, **KEYS)
    others = start(folder, "-c", code, **places)

    assert (without.returncode, int(without.stdout) > 50) == (0, True), without.stderr
    assert "DJANGO_SECRET_KEY: must not be set" in given.stderr
    assert "AFTERTOUCH_SECRETS_KEYS: must not be set" in given.stderr
    assert "DJANGO_SECRET_KEY: must be set" in others.stderr


@pytest.mark.parametrize(
    "words", [("-m", "celery", "-A", "config", "worker", "-Q", "touch.high"), ("-c", "import config.asgi")]
)
def test_execution_role_refuses_other_programs(folder: Path, words: tuple[str, ...]) -> None:
    places = {name: PLACES[name] for name in ("DATABASE_URL", "REDIS_URL", "DJANGO_SETTINGS_MODULE")}
    refused = start(folder, *words, AFTERTOUCH_ROLE="execution", AFTERTOUCH_RPA_ISOLATION="none", **places)
    assert refused.returncode != 0
    assert "AFTERTOUCH_ROLE: execution has no keys" in refused.stderr


def test_invalid_isolation_settings_stop_start(folder: Path) -> None:
    invalid = {"AFTERTOUCH_RPA_ISOLATION": "jail", "AFTERTOUCH_RPA_PATHS": "opt/flows", "AFTERTOUCH_ROLE": "king"}
    refused = start(folder, "-c", SETUP, DJANGO_SETTINGS_MODULE="config.settings.local", **invalid)
    assert refused.returncode != 0
    assert {line.split(":")[0].strip() for line in refused.stderr.splitlines()[1:]} == set(invalid)


WORKER = ("-m", "celery", "-A", "config", "worker", "-Q", "high", "-c", "1")


def test_production_worker_requires_isolation_setting(folder: Path) -> None:
    """Without bwrap on the PATH an ordinary user has no isolation."""
    refused = start(folder, *WORKER, ordinary=True, PATH="/nowhere", **PLACES, **KEYS)
    elsewhere = start(folder, "manage.py", "check", ordinary=True, PATH="/nowhere", **PLACES, **KEYS)
    role = {"PATH": "/nowhere", "AFTERTOUCH_ROLE": "execution"}
    checked = start(folder, "manage.py", "check", ordinary=True, **role, **PLACES)
    local = {"PATH": "/nowhere", "DJANGO_SETTINGS_MODULE": "config.settings.local"}
    warned = start(folder, "manage.py", "check", ordinary=True, **local)
    silent = start(folder, "manage.py", "check", ordinary=True, AFTERTOUCH_RPA_ISOLATION="none", **local)
    runs = start(folder, "-c", f"{SETUP}from rpa_tasks.isolation import is_isolated; print(is_isolated())", **local)

    assert (refused.returncode, "AFTERTOUCH_RPA_ISOLATION=bubblewrap does not work here" in refused.stderr) == (
        1, True,
    ), refused.stderr  # fmt: skip
    assert elsewhere.returncode == 0, elsewhere.stderr  # a machine that only serves pages
    assert (checked.returncode, "rpa_tasks.E002" in checked.stderr) == (1, True)
    assert (warned.returncode, "rpa_tasks.W002" in warned.stderr) == (0, True)
    assert (silent.returncode, "W002" in silent.stderr) == (0, False)
    assert runs.stdout == "False\n", runs.stderr
