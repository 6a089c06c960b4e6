"""List the static files of the packages once a process. WhiteNoise does it for each test client, in 20 ms."""

from __future__ import annotations

from typing import Any

import pytest


def pytest_configure(config: pytest.Config) -> None:
    from whitenoise.middleware import WhiteNoiseMiddleware

    list_files = WhiteNoiseMiddleware.add_files_from_finders
    listed: dict[str, Any] = {}

    def add_listed_files(middleware: WhiteNoiseMiddleware) -> None:
        if not listed:
            own, middleware.files = middleware.files, listed
            list_files(middleware)
            middleware.files = own
        middleware.files.update(listed)

    WhiteNoiseMiddleware.add_files_from_finders = add_listed_files
