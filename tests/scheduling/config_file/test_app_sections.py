"""Another app's section: named in the settings, it is read, stored and exported like the rest."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import pytest
from pytest_django import Settings

from scheduling.configuration.file.section import Section
from scheduling.errors import InvalidInput
from scheduling.models import Stage
from tests.support.config_files import Apply


class Platforms(Section):
    """It is on the table of stages: its content is about the derived fields."""

    name = "platforms"
    noun = "platform"
    model = Stage
    left_out = frozenset({"position"})


@pytest.fixture(autouse=True)
def installed(settings: Settings) -> None:
    sys.modules["another_app"] = sys.modules[__name__]
    settings.CONFIG_SECTIONS = ["another_app.Platforms"]


def test_other_app_section_is_applied_and_exported(
    apply: Callable[..., str], export: Callable[..., str], refusal_of: Callable[..., list[str]]
) -> None:
    assert apply("platforms: [{key: pdd, name: 拼多多}]") == "platforms\n  + pdd\napplied\n"
    assert "platforms:\n  - key: pdd\n    name: 拼多多\n" in export()
    assert apply("platforms: []") == "platforms\n  - pdd (retired)\napplied\n"
    assert refusal_of("platforms: [{key: pdd, colour: red}]")[0] == (
        "platforms[0].colour: is not known here; known are key, name"
    )


def test_section_of_missing_app_names_the_app(refusal_of: Callable[..., list[str]]) -> None:
    assert refusal_of("shops: []")[0] == "shops: this section needs app “rpa_tasks”, which is not installed"


def test_other_app_section_check_is_called(
    apply: Apply, refusal_of: Callable[..., list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    def check_values(*_: Any) -> None:
        raise InvalidInput.of("name", "is not ours")

    monkeypatch.setattr(Platforms, "check_values", check_values)
    assert refusal_of("platforms: [{key: pdd}]")[0] == "platforms[0].name: is not ours"
