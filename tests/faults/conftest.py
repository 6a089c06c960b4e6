"""The stack for most faults, and the summary line of each run."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import pytest
from kombu import Connection

from tests.faults.brokers import RabbitNode, rabbitmq
from tests.faults.fault_stack import FaultStack, Run, faults, run_fault_stack


@pytest.fixture(scope="session")
def fault_stack(state_folder) -> Iterator[FaultStack]:
    with run_fault_stack(state_folder("stack")) as made:
        yield made


@pytest.fixture(scope="session")
def rabbit_node(state_folder) -> Iterator[RabbitNode]:
    """One node for the tests that leave it running: a start takes seconds."""
    with rabbitmq(state_folder("rabbit")) as node:
        yield node


@pytest.fixture
def rabbit(rabbit_node) -> Iterator[RabbitNode]:
    """The node, without alarm and queues afterwards."""
    yield rabbit_node
    rabbit_node.control("set_vm_memory_high_watermark", "0.4")
    with Connection(rabbit_node.url) as connection:
        listed = rabbit_node.control("list_queues", "name", "--silent", "--no-table-headers")
        for name in listed.split():
            connection.default_channel.queue_delete(name)


@pytest.fixture
def under_load(report_line) -> Callable[..., AbstractContextManager[Run]]:
    @contextmanager
    def under_load(where: FaultStack, name: str, **changes: Any) -> Iterator[Run]:
        run: Run | None = None
        try:
            with faults(where, name, **changes) as run:
                yield run
        finally:
            if run is not None:
                report_line(run.line())

    return under_load
