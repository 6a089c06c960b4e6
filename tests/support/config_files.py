"""Fixtures that apply and export configuration files by the commands."""

from __future__ import annotations

import textwrap
from collections.abc import Callable
from io import StringIO

import pytest
from django.core.management import call_command
from django.core.management.base import CommandError

Apply = Callable[..., str]


@pytest.fixture
def apply(tmp_path, db) -> Apply:
    """Apply a text as a file; returns what was printed."""

    def apply(text: str, *flags: str) -> str:
        file = tmp_path / "configuration.yaml"
        file.write_text(textwrap.dedent(text), encoding="utf-8")
        out = StringIO()
        call_command("apply_config", str(file), *flags, stdout=out)
        return out.getvalue()

    return apply


@pytest.fixture
def refusal_of(apply) -> Callable[..., list[str]]:
    """Apply a text that must be refused; returns the lines of the refusal."""

    def refusal_of(text: str, *flags: str) -> list[str]:
        with pytest.raises(CommandError) as error:
            apply(text, *flags)
        assert error.value.returncode == 1
        return str(error.value).splitlines()

    return refusal_of


@pytest.fixture
def export(db) -> Apply:
    def export(*flags: str) -> str:
        out = StringIO()
        call_command("export_config", *flags, stdout=out)
        return out.getvalue()

    return export
