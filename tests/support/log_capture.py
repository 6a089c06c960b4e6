"""Capture this process's log."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from io import StringIO

import pytest
import structlog


@pytest.fixture
def read_log(capsys) -> Iterator[Callable[[], str]]:
    """Return the log from now on, in the product's format, of every library and level."""
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
