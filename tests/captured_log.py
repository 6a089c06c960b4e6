"""What this process writes into its log."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from io import StringIO
from typing import Any

import pytest
import structlog


@pytest.fixture
def read_log(capsys: Any) -> Iterator[Callable[[], str]]:
    """All of it from now on, as the product writes it, of every library, at every level."""
    root = logging.getLogger()
    (configured,) = [each for each in root.handlers if isinstance(each.formatter, structlog.stdlib.ProcessorFormatter)]
    told = StringIO()
    handler, level = logging.StreamHandler(told), root.level
    handler.setFormatter(configured.formatter)
    root.addHandler(handler)
    root.setLevel(logging.DEBUG)
    yield lambda: told.getvalue() + "".join(capsys.readouterr())
    root.setLevel(level)
    root.removeHandler(handler)
