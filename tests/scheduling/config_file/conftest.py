"""Files that are applied and exported through the commands, against the real database."""

from __future__ import annotations

import pytest

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


@pytest.fixture
def base_config() -> str:
    """One channel, one template, one stage, one node."""
    return BASE_CONFIG
