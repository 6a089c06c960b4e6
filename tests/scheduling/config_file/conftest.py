"""Files that are applied and exported through the commands, against the real database."""

from __future__ import annotations

import pytest

from scheduling.models import Configuration
from tests.support.config_files import Apply as Apply
from tests.support.config_files import apply as apply
from tests.support.config_files import export as export
from tests.support.config_files import refusal_of as refusal_of

BASE_CONFIG = """
version: 1
channels: [{key: log, kind: log}]
templates: [{key: guide, content_type: guide, category: service, body: "您好 {{ user.name }}"}]
stages: [{key: presale, name: 售前}]
nodes:
  - {key: presale-download, stage: presale, trigger: material.downloaded, delay: 15m, template: guide, channel: log}
"""


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
def base_config() -> str:
    """One channel, one template, one stage, one node."""
    return BASE_CONFIG
