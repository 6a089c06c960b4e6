"""A market with two platforms, a web process before it, and files to apply to it."""

from __future__ import annotations

from typing import Any

import pytest

from rpa_tasks.models import Flow, Platform, Shop
from scheduling.models import Scope
from scheduling.operations import commands
from tests.scheduling.api.serving import Client
from tests.support.config_files import Apply as Apply
from tests.support.config_files import apply as apply
from tests.support.config_files import export as export
from tests.support.config_files import refusal_of as refusal_of


class Market:
    def __init__(self) -> None:
        self.pdd = Platform.objects.create(key="pdd")
        self.sync = self.flow("sync_order", dedupe_by="task_type")
        self.s1, self.s2 = self.shop("s1"), self.shop("s2")

    def shop(self, shop_id: str, **changes: Any) -> Shop:
        return Shop.objects.create(**{"platform": self.pdd, "shop_id": shop_id} | changes)

    def flow(self, task_type: str, **changes: Any) -> Flow:
        usual: dict[str, Any] = {"platform": self.pdd, "command": ["true", "{param}"]}
        return Flow.objects.create(task_type=task_type, **usual | changes)


@pytest.fixture
def market(db) -> Market:
    return Market()


# --- over HTTP ------------------------------------------------------------------------------------------------------


@pytest.fixture
def key(transactional_db) -> str:
    return commands.create_api_key("shop", [Scope.RPA, Scope.RPA_CONFIGURE])


@pytest.fixture
def api(server, key, market) -> Client:
    """A client that may do what this API offers, and nothing else."""
    return Client(server, key)


# --- files ----------------------------------------------------------------------------------------------------------
