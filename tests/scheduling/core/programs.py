"""Python in a process of its own on the test database, to be killed wherever it is."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from config.environment import ROOT
from scheduling import sql
from tests.scheduling.api.serving import database_url


@contextmanager
def program(text: str, *words: str, **pipes: Any) -> Iterator[subprocess.Popen[bytes]]:
    env = os.environ | {"DATABASE_URL": database_url()}
    with subprocess.Popen([sys.executable, "-c", text, *words], cwd=ROOT, env=env, **pipes) as process:
        try:
            yield process
        finally:
            process.kill()


def is_connected(name: str, wait: str = "%") -> bool:
    """Whether a program of this `application_name` is there, and waits for such a thing."""
    statement = """
        SELECT EXISTS (
            SELECT FROM pg_stat_activity
            WHERE application_name = %(name)s AND COALESCE(wait_event_type, '') LIKE %(wait)s
        )
    """
    ((there,),) = sql.rows(statement, {"name": name, "wait": wait})
    return bool(there)


def waits_for_a_lock(name: str) -> bool:
    return is_connected(name, "Lock")
