from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any
from uuid import UUID

import pytest
from django.db import connection

from scheduling.models import ChannelConfig, Scope, Touch
from scheduling.operations import commands
from tests.scheduling.api.serving import Client, Gate, cloud_event, database_url, serving
from tests.scheduling.core.conftest import deliver_when_due


@pytest.fixture
def gate() -> Iterator[Gate]:
    gate = Gate(int(connection.settings_dict["PORT"]))
    yield gate
    gate.shut()


@pytest.fixture
def server_behind_gate(transactional_db, gate) -> Iterator[str]:
    """A server whose way to PostgreSQL leads through `gate`."""
    with serving(DATABASE_URL=database_url(gate.port)) as address:
        yield address


@pytest.fixture
def key(transactional_db) -> str:
    """A key that may do everything."""
    return commands.create_api_key("shop", Scope.values)


@pytest.fixture
def api(server, key) -> Client:
    return Client(server, key)


@pytest.fixture
def key_for(server, transactional_db) -> Callable[..., Client]:
    """A client whose key has only these scopes."""

    def key_for(*scopes: str, **changes: Any) -> Client:
        return Client(server, commands.create_api_key(("some-" + "-".join(scopes))[:100], scopes, **changes))

    return key_for


@pytest.fixture
def sent(matrix, api) -> UUID:
    """Return the delivery key of a message that Ann got by mail."""
    node = matrix.node()
    api("PUT", "/customers/ann", {"addresses": {"email": "ann@example.com"}})
    api.event(cloud_event())
    task_id: UUID = Touch.objects.get().pk
    assert deliver_when_due(task_id)[0].state == "delivered"
    node.channel = ChannelConfig.objects.create(key="mail", kind="email", config={"from": "shop@example.com"})
    node.save()
    return task_id
