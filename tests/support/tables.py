"""A table of cases as one test: set up once, with every row that fails in the report."""

from __future__ import annotations

import inspect
import traceback
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Any, TypeVar

import pytest
from django.db import connection, transaction

Test = TypeVar("Test", bound=Callable[..., Any])


def each_row(names: str, rows: Iterable[Any]) -> Callable[[Test], Test]:
    """Call the test with each row, as `pytest.mark.parametrize` does, but in one test and with the same fixtures.

    What a row patches is undone before the next one. So is what it writes, in a test that commits nothing.
    """
    columns = [name.strip() for name in names.split(",")]
    table = [dict(zip(columns, row if len(columns) > 1 else [row], strict=True)) for row in rows]

    def decorate(test: Test) -> Test:
        def run_rows(**fixtures: Any) -> None:
            failures: list[str] = []
            for row in table:
                with collect_failure(failures, row), pytest.MonkeyPatch.context() as patch:
                    test(**fixtures | {name: patch for name in fixtures if name == "monkeypatch"}, **row)
            report(failures)

        async def await_rows(**fixtures: Any) -> None:
            failures: list[str] = []
            for row in table:
                with collect_failure(failures, row), pytest.MonkeyPatch.context() as patch:
                    await test(**fixtures | {name: patch for name in fixtures if name == "monkeypatch"}, **row)
            report(failures)

        def report(failures: list[str]) -> None:
            if failures:
                pytest.fail("\n\n".join([f"{len(failures)} of {len(table)} rows failed", *failures]), pytrace=False)

        run: Any = wraps(test)(await_rows if inspect.iscoroutinefunction(test) else run_rows)
        signature = inspect.signature(test)
        asked = [each for each in signature.parameters.values() if each.name not in columns]
        run.__signature__ = signature.replace(parameters=asked)
        return run

    return decorate


@contextmanager
def collect_failure(failures: list[str], row: dict[str, Any]) -> Iterator[None]:
    try:
        if connection.connection is not None and connection.in_atomic_block:
            with transaction.atomic():
                yield
                transaction.set_rollback(True)
        else:
            yield
    except (Exception, pytest.fail.Exception) as error:
        if str(error).startswith("Timeout"):  # of pytest-timeout: nothing would end the next row
            raise
        failures.append(f"{row!r}"[:2000] + "\n" + "".join(traceback.format_exception(error)))
