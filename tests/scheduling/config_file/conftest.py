"""Files that are applied and exported through the commands, against the real database."""

from __future__ import annotations

import textwrap
from collections.abc import Callable
from io import StringIO
from pathlib import Path

import pytest
from django.core.management import call_command
from django.core.management.base import CommandError

from scheduling.models import Configuration

BASE_CONFIG = """
version: 1
channels: [{key: log, kind: log}]
templates: [{key: guide, content_type: guide, category: service, body: "您好 {{ user.name }}"}]
stages: [{key: presale, name: 售前}]
nodes:
  - {key: presale-download, stage: presale, trigger: material.downloaded, delay: 15m, template: guide, channel: log}
"""

Apply = Callable[..., str]


@pytest.fixture(autouse=True)
def _counted(request: pytest.FixtureRequest) -> None:
    """A test that flushes the tables also takes the row by which edits are noticed."""
    if request.node.get_closest_marker("django_db") or "db" in request.fixturenames:
        request.getfixturevalue("transactional_db" if _commits(request) else "db")
        Configuration.objects.get_or_create(pk=1)


def _commits(request: pytest.FixtureRequest) -> bool:
    marker = request.node.get_closest_marker("django_db")
    return bool(marker and marker.kwargs.get("transaction"))


@pytest.fixture
def apply(tmp_path: Path, db: None) -> Apply:
    """Apply a text as a file; returns what was printed."""

    def apply(text: str, *flags: str) -> str:
        file = tmp_path / "house.yaml"
        file.write_text(textwrap.dedent(text), encoding="utf-8")
        out = StringIO()
        call_command("apply_config", str(file), *flags, stdout=out)
        return out.getvalue()

    return apply


@pytest.fixture
def refused(apply: Apply) -> Callable[..., list[str]]:
    """Apply a text that must be refused; returns the lines of the refusal."""

    def refused(text: str, *flags: str) -> list[str]:
        with pytest.raises(CommandError) as error:
            apply(text, *flags)
        assert error.value.returncode == 1
        return str(error.value).splitlines()

    return refused


@pytest.fixture
def export(db: None) -> Apply:
    def export(*flags: str) -> str:
        out = StringIO()
        call_command("export_config", *flags, stdout=out)
        return out.getvalue()

    return export


@pytest.fixture
def base_config() -> str:
    """One channel, one template, one stage, one node."""
    return BASE_CONFIG
