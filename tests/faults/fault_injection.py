"""The faults, each as one blow that returns once what it broke is whole again."""

from __future__ import annotations

from collections.abc import Callable

import psutil
import redis

from config.local.processes import is_alive
from tests.faults.fault_stack import Run


def kill_worker(run: Run) -> None:
    family = run.target.family("core")
    run.inject_fault()
    family[0].kill()
    run.target.await_running("core", instead_of=family[0].pid)
    run.target.await_gone(family)
    run.target.expire_leases(run.target.now())


def kill_pool_child(run: Run) -> None:
    main = run.target.family("core")[0]
    # A worker that has just started forks its pool some time after it counts as running.
    run.target.wait(lambda: bool(living_children(main)), "there are children")
    children = living_children(main)
    victim = run.chance.choice(children)
    struck_at = run.inject_fault()
    victim.kill()
    run.target.await_gone([victim])
    # Its claims look like those of the live child, so its results count as late.
    run.target.expire_leases(struck_at)
    run.target.wait(lambda: len(living_children(main)) >= len(children), "the child is replaced")
    assert run.target.stack.pids["core"] == main.pid


def living_children(main: psutil.Process) -> list[psutil.Process]:
    """Return processes that were not killed. A killed one is listed until its parent notices."""
    return [each for each in main.children() if is_alive(each)]


def kill_ticks(run: Run) -> None:
    family = run.target.family("ticks")
    run.inject_fault()
    family[0].kill()
    run.target.await_running("ticks", instead_of=family[0].pid)
    run.target.await_gone(family)


def kill_beat(run: Run) -> None:
    run.target.await_running("beat")
    run.inject_fault()
    killed = run.target.stack.kill("beat")
    run.target.await_running("beat", instead_of=killed)


def kill_web(run: Run) -> None:
    run.target.await_running("web")
    run.inject_fault()
    killed = run.target.stack.kill("web")
    run.target.await_running("web", instead_of=killed)


def flush(run: Run) -> None:
    """Redis forgets everything: wake-ups, quotas, sessions."""
    with redis.Redis.from_url(run.target.stack.endpoints.redis_url) as client:
        run.inject_fault()
        client.flushall()


def kill_postgres(run: Run) -> None:
    _kill_server(run, "PostgreSQL")


def kill_valkey(run: Run) -> None:
    _kill_server(run, "Valkey")


def _kill_server(run: Run, server: str) -> None:
    run.inject_fault()
    killed = run.target.stack.kill(server)
    run.target.wait(lambda: run.target.stack.server_pids.get(server, killed) != killed, f"{server} runs again")


FAULTS: dict[str, Callable[[Run], None]] = {
    "kill -9 worker": kill_worker,
    "kill -9 pool child": kill_pool_child,
    "kill -9 ticks": kill_ticks,
    "kill -9 beat": kill_beat,
    "kill -9 web": kill_web,
    "FLUSHALL": flush,
    "kill -9 PostgreSQL": kill_postgres,
    "kill -9 Valkey": kill_valkey,
}
