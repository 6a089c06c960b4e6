"""What a process must be given, or do, before it may run commands of flows."""

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from config.environment import ROOT
from rpa_tasks import isolation
from rpa_tasks.checks import check_isolation
from tests.rpa_tasks.isolation.test_hostile_flow import HERE, ORDINARY

KEYS = {"DJANGO_SECRET_KEY": "k" * 20 + "0123456789" * 4 + "!", "AFTERTOUCH_SECRETS_KEYS": "abcdefghij" * 5}
PLACES = {
    "DATABASE_URL": "postgresql://x@127.0.0.1:1/x", "REDIS_URL": "redis://127.0.0.1:1/0",
    "DJANGO_ALLOWED_HOSTS": "a.example", "AFTERTOUCH_BASE_URL": "https://a.example",
    "DJANGO_SETTINGS_MODULE": "config.settings.production",
}  # fmt: skip
SETUP = "import django; django.setup(); "


def start(folder, *words, ordinary=False, **environment):
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
def folder():
    made = Path(tempfile.mkdtemp(prefix="start-"))
    yield made
    shutil.rmtree(made, ignore_errors=True)


def test_production_process_environment_cannot_be_read(folder):
    """A process of the same uid may open its parent's environment and memory only while the parent is dumpable."""
    look = "import os; print(open(f'/proc/{os.getppid()}/environ').read())"
    code = f"{SETUP}import subprocess, sys; sys.exit(subprocess.run([sys.executable, '-c', {look!r}]).returncode)"

    kept = start(folder, "-c", code, ordinary=True, **PLACES, **KEYS)
    shown = start(folder, "-c", code, ordinary=True, **PLACES | {"DJANGO_SETTINGS_MODULE": "config.settings.local"})

    assert "PermissionError" in kept.stderr
    assert "DJANGO_SETTINGS_MODULE" in shown.stdout


def test_execution_role_refuses_keys(folder):
    code = f"{SETUP}from django.conf import settings; print(len(settings.SECRET_KEY))"
    places = {name: PLACES[name] for name in ("DATABASE_URL", "REDIS_URL", "DJANGO_SETTINGS_MODULE")}

    without = start(folder, "-c", code, AFTERTOUCH_ROLE="execution", **places)
    given = start(folder, "-c", code, AFTERTOUCH_ROLE="execution", **places, **KEYS)

    assert (without.returncode, int(without.stdout) > 50) == (0, True), without.stderr
    assert "DJANGO_SECRET_KEY: must not be set" in given.stderr
    assert "AFTERTOUCH_SECRETS_KEYS: must not be set" in given.stderr


@pytest.mark.parametrize(
    "words", [("-m", "celery", "-A", "config", "worker", "-Q", "touch.high"), ("-c", "import config.asgi")]
)
def test_execution_role_refuses_other_programs(folder, words):
    places = {name: PLACES[name] for name in ("DATABASE_URL", "REDIS_URL", "DJANGO_SETTINGS_MODULE")}
    refused = start(folder, *words, AFTERTOUCH_ROLE="execution", AFTERTOUCH_RPA_ISOLATION="none", **places)
    assert refused.returncode != 0
    assert "AFTERTOUCH_ROLE: execution has no keys" in refused.stderr


WORKER = ("-m", "celery", "-A", "config", "worker", "-Q", "high", "-c", "1")


def test_production_worker_requires_isolation_setting(folder):
    """Without bwrap on the PATH an ordinary user has no isolation."""
    refused = start(folder, *WORKER, ordinary=True, PATH="/nowhere", **PLACES, **KEYS)
    assert (refused.returncode, "AFTERTOUCH_RPA_ISOLATION=bubblewrap does not work here" in refused.stderr) == (
        1, True,
    ), refused.stderr  # fmt: skip


def test_missing_isolation_is_reported_where_jobs_run(settings, monkeypatch):
    monkeypatch.setenv("PATH", "/nowhere")

    def found(role, *, required, kind=isolation.BUBBLEWRAP):
        settings.AFTERTOUCH_ROLE, settings.AFTERTOUCH_RPA_ISOLATION_REQUIRED = role, required
        settings.AFTERTOUCH_RPA_ISOLATION = kind
        return [each.id for each in check_isolation()]

    assert found("all", required=True) == []  # a machine that only serves pages
    assert found("execution", required=True) == ["rpa_tasks.E002"]
    assert found("all", required=False, kind=isolation.NONE) == []
    assert found("all", required=False) == ["rpa_tasks.W002"]
    assert not isolation.is_isolated()
