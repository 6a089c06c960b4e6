"""The threads in which the API talks to the database, each with a connection that it keeps.

Django gives each request under ASGI a thread of its own, which ends with it and takes its connection along: a login
to PostgreSQL for every request.
"""

from __future__ import annotations

import asyncio
import contextvars
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import ParamSpec, TypeVar

from django.db import close_old_connections, reset_queries

P = ParamSpec("P")
R = TypeVar("R")

THREADS = 8

_threads = ThreadPoolExecutor(THREADS, thread_name_prefix="api")


async def in_database_thread(function: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
    """Run `function` where it may use the ORM. It is not stopped by a cancelled wait."""
    context = contextvars.copy_context()
    call = partial(_with_connection, partial(function, *args, **kwargs))
    return await asyncio.get_running_loop().run_in_executor(_threads, context.run, call)


def _with_connection(call: Callable[[], R]) -> R:
    reset_queries()
    close_old_connections()
    try:
        return call()
    finally:
        close_old_connections()
