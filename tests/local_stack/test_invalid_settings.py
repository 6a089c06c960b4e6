"""A setting that does not fit stops the start and is named."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from config.environment import ROOT, Environment


def start(module: str, *words: str, **env: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", module, *words],
        cwd=ROOT, env={**os.environ, **env}, text=True, capture_output=True, timeout=60, check=False,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("AFTERTOUCH_PORT", "eighty"),
        ("AFTERTOUCH_PORT", "70000"),
        ("AFTERTOUCH_TIME_SCALE", "0"),
        ("AFTERTOUCH_WORKER_CONCURRENCY", "-1"),
        ("AFTERTOUCH_SCALE_WORKERS_MIN", "0"),
        ("AFTERTOUCH_SCALE_DOWN_AFTER", "never"),
        ("DJANGO_LOG_LEVEL", "LOUD"),
    ],
)
@pytest.mark.parametrize("action", ["servers", "run"])
def test_invalid_setting_stops_start_and_is_named(tmp_path: Path, action: str, name: str, value: str) -> None:
    state_dir = tmp_path / "state"
    refused = start("config.local", action, AFTERTOUCH_STATE_DIR=str(state_dir), **{name: value})
    assert refused.returncode == 1
    assert name in refused.stderr
    assert "Traceback" not in refused.stderr
    assert not state_dir.exists()


@pytest.mark.parametrize(
    ("others", "words"),
    [
        ({"AFTERTOUCH_WORKER_MIN": "3"}, "AFTERTOUCH_WORKER_MIN, which is 3"),
        ({"AFTERTOUCH_RABBITMQ_QUORUM": "true"}, "AFTERTOUCH_RABBITMQ_QUORUM"),
    ],
)
def test_conflicting_worker_bounds_are_named(others: dict[str, str], words: str) -> None:
    refused = start("config.local", "run", AFTERTOUCH_WORKER_MAX="2", **others)
    assert refused.returncode == 1
    assert "AFTERTOUCH_WORKER_MAX" in refused.stderr
    assert words in refused.stderr


@pytest.mark.parametrize("kind", ["WORKERS", "NODES", "WATCHERS"])
def test_conflicting_scale_bounds_are_named(kind: str) -> None:
    bounds = {f"AFTERTOUCH_SCALE_{kind}_MIN": "3", f"AFTERTOUCH_SCALE_{kind}_MAX": "2"}
    refused = start("config.local", "run", **bounds)
    assert refused.returncode == 1
    assert (
        f"AFTERTOUCH_SCALE_{kind}_MAX: Value error, must not be less than AFTERTOUCH_SCALE_{kind}_MIN" in refused.stderr
    )


def test_equal_worker_bounds_are_accepted() -> None:
    bounds = Environment(aftertouch_worker_min=2, aftertouch_worker_max=2)
    assert (bounds.aftertouch_worker_min, bounds.aftertouch_worker_max) == (2, 2)


def test_all_invalid_settings_are_named() -> None:
    refused = start("config.local", "run", AFTERTOUCH_PORT="0", AFTERTOUCH_FLOWER_PORT="x")
    assert "AFTERTOUCH_PORT" in refused.stderr
    assert "AFTERTOUCH_FLOWER_PORT" in refused.stderr


SECRET_KEY = "0123456789abcdef" * 4
PRODUCTION = {
    "DATABASE_URL": "postgresql://a@127.0.0.1:1/a",
    "REDIS_URL": "redis://127.0.0.1:1/0",
    "DJANGO_SECRET_KEY": SECRET_KEY,
    "DJANGO_ALLOWED_HOSTS": "aftertouch.example",
    "AFTERTOUCH_BASE_URL": "https://aftertouch.example",
    "AFTERTOUCH_SECRETS_KEYS": f"{SECRET_KEY[:43]},{SECRET_KEY[:32]}",
}


def load(module: str, **env: str) -> subprocess.CompletedProcess[str]:
    """Import an entry point and print its settings."""
    ours = {name: value for name, value in os.environ.items() if not name.startswith(("DJANGO_", "AFTERTOUCH_"))}
    code = f"import {module}; from django.conf import settings; print(settings.SETTINGS_MODULE, settings.SECRET_KEY)"
    return subprocess.run(
        [sys.executable, "-c", code],
        cwd=ROOT, env={**ours, **env}, text=True, capture_output=True, timeout=120, check=False,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("DJANGO_SECRET_KEY", "x"),
        ("DJANGO_SECRET_KEY", SECRET_KEY[:49]),
        ("DJANGO_SECRET_KEY", "x" * 64),
        ("AFTERTOUCH_SECRETS_KEYS", SECRET_KEY[:42]),
        ("AFTERTOUCH_SECRETS_KEYS", "x" * 64),
        ("AFTERTOUCH_SECRETS_KEYS", f"{SECRET_KEY},{SECRET_KEY[:31]}"),
        ("AFTERTOUCH_TIME_SCALE", "2.5"),
        ("AFTERTOUCH_TIME_SCALE", "0.5"),
    ],
)
def test_weak_production_value_stops_start_without_its_text(tmp_path: Path, name: str, value: str) -> None:
    refused = load("config.asgi", **{**PRODUCTION, "AFTERTOUCH_STATE_DIR": str(tmp_path), name: value})
    assert refused.returncode == 1
    assert [line.split(":")[0].strip() for line in refused.stderr.splitlines()[1:]] == [name]
    assert value not in refused.stderr


@pytest.mark.parametrize("module", ["config.asgi", "config.wsgi"])
def test_entry_point_without_settings_uses_production(tmp_path: Path, module: str) -> None:
    refused = load(module, AFTERTOUCH_STATE_DIR=str(tmp_path))
    assert refused.returncode == 1
    assert "DJANGO_SECRET_KEY: must be set in production" in refused.stderr
    started = load(module, **PRODUCTION, AFTERTOUCH_STATE_DIR=str(tmp_path))
    assert started.stdout.split() == ["config.settings.production", SECRET_KEY], started.stderr
