"""One web process for all tests, and one without Redis: a start costs seconds of processor time."""

from __future__ import annotations

from collections.abc import Iterator

import pytest


@pytest.fixture(scope="session")
def web_process(django_db_setup, django_db_blocker) -> Iterator[str]:
    """Return the address of a web process on the test database."""
    from tests.scheduling.api.serving import serving

    with django_db_blocker.unblock(), serving() as address:
        yield address


@pytest.fixture(scope="session")
def server(web_process) -> str:
    return web_process


@pytest.fixture(scope="session")
def server_without_redis(django_db_setup, django_db_blocker) -> Iterator[str]:
    """Return the address of one whose Redis and broker are unavailable."""
    from tests.scheduling.api.serving import NOWHERE, serving

    with django_db_blocker.unblock(), serving(REDIS_URL=NOWHERE, CELERY_BROKER_URL=NOWHERE) as address:
        yield address
