"""Run the API's database calls in threads that keep their connections.

Under ASGI, Django uses a new thread for each request. Its connection ends with it, so each request would cost a login
to PostgreSQL.
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
AUTH_THREADS = 2  #: for keys and rates: a look-up every few seconds, a lease every few hundred requests

_threads = ThreadPoolExecutor(THREADS, thread_name_prefix="api")
_auth_threads = ThreadPoolExecutor(AUTH_THREADS, thread_name_prefix="api-auth")


async def in_database_thread(function: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
    """Run `function` in a thread that may use the ORM. Cancelling the wait does not stop the function."""
    return await _run_in_pool(_threads, partial(function, *args, **kwargs))


async def in_auth_thread(function: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
    """Run `function` in the threads for authentication.

    Events use no other threads, so they must not wait for reading requests.
    """
    return await _run_in_pool(_auth_threads, partial(function, *args, **kwargs))


async def _run_in_pool(pool: ThreadPoolExecutor, call: Callable[[], R]) -> R:
    context = contextvars.copy_context()
    return await asyncio.get_running_loop().run_in_executor(pool, context.run, partial(_call_with_connection, call))


def _call_with_connection(call: Callable[[], R]) -> R:
    reset_queries()
    close_old_connections()
    try:
        return call()
    finally:
        close_old_connections()
