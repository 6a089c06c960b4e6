"""One web process for the tests of a file: a start costs seconds of processor time."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from pytest_django import DjangoDbBlocker

from tests.scheduling.api.serving import serving


@pytest.fixture(scope="module")
def server(django_db_setup: None, django_db_blocker: DjangoDbBlocker) -> Iterator[str]:
    """Return the address of a web process on the test database."""
    with django_db_blocker.unblock(), serving(DJANGO_SETTINGS_MODULE="config.settings.test") as address:
        yield address
