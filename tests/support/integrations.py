"""Replace what the apps add to the core."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest

from scheduling import app_integrations


def replace_sockets(monkeypatch: pytest.MonkeyPatch, **sockets: Any) -> None:
    """Give these sockets the given values, and no app any other."""
    empty = {name: type(value)() for name, value in sockets.items()}
    others = tuple(replace(app, **empty) for app in app_integrations.integrations())
    mine = app_integrations.Integration(**sockets)
    monkeypatch.setattr(app_integrations, "load_integrations", lambda _paths: (*others, mine))


@pytest.fixture
def integrate(monkeypatch) -> Callable[..., None]:
    return partial(replace_sockets, monkeypatch)
