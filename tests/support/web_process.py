"""One web process for the tests of the API and of rights: a start costs seconds of processor time."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from pytest_django import DjangoDbBlocker


@pytest.fixture(scope="session")
def server(django_db_setup: None, django_db_blocker: DjangoDbBlocker) -> Iterator[str]:
    """Return the address of a web process on the test database."""
    from tests.scheduling.api.serving import serving

    with django_db_blocker.unblock(), serving() as address:
        yield address
