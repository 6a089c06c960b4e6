"""Measure thousands of WebSockets on one process: memory, pongs, and a burst of pushes."""

from __future__ import annotations

import asyncio
import json
import resource
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import psutil

from benchmarks.environment import Bench, stop_program, wait_until
from config.environment import ROOT
from config.local.processes import select_port

GOAL_KB, GOAL_BURST = 60.0, 3.0
PING_EVERY = 15.0
CROWDS = 2
IN_FLIGHT = 200  #: the sender's limit for one receiver
WARM = 50
#: As in `config.local.stack`, with one process.
WEB = (
    "uvicorn", "config.asgi:application", "--host", "127.0.0.1",
    "--http", "config.http_protocol:BoundedHttpProtocol",
    "--ws", "websockets-sansio",
    "--ws-ping-interval", "60", "--ws-max-size", "65536", "--ws-per-message-deflate", "false",
    "--log-level", "warning", "--no-access-log",
)  # fmt: skip


def sockets(bench: Bench) -> None:
    count = bench.size(5_000, 5_000)
    rounds = bench.size(3, 1)
    _allow_files()
    for repetition in range(bench.repeat):
        port = select_port()
        with bench.running(*WEB, "--port", str(port)) as web:
            with _start_load(bench, f"warm{repetition}", WARM, port):
                pass
            before, burnt = web.memory_info().rss, sum(web.cpu_times()[:2])
            load_processes = [
                _start_load(bench, f"r{repetition}c{number}", count // CROWDS, port) for number in range(CROWDS)
            ]
            with load_processes[0] as one, load_processes[1] as two:
                took = sum(web.cpu_times()[:2]) - burnt
                bench.figures.add("sockets", "processor time of an opening", took / count * 1e6, "µs")
                _measure_pings(bench, web, [one, two], rounds)
                each = (web.memory_info().rss - before) / count / 1024
                bench.figures.add(
                    "sockets", "memory of one", each, "KB", goal=GOAL_KB, note=f"{count:,} on one process, resident"
                )
                names = [f"r{repetition}c{load}-{page:05}" for load in range(CROWDS) for page in range(count // CROWDS)]
                _measure_burst(bench, [one, two], names)


def _measure_pings(bench: Bench, web: psutil.Process, load_processes: list[LoadProcess], rounds: int) -> None:
    burnt, began_at = sum(web.cpu_times()[:2]), time.monotonic()
    time.sleep(PING_EVERY * rounds + 1)
    busy = (sum(web.cpu_times()[:2]) - burnt) / (time.monotonic() - began_at)
    reports = [load.report() for load in load_processes]
    add, note = bench.figures.add, f"every {PING_EVERY:g} s, {rounds} rounds"
    unanswered = sum(each["pings"] - each["pongs"] for each in reports)
    add("sockets", "pings that were missed", sum(each["missed"] for each in reports), "pings", goal=0, note=note)
    add("sockets", "pings under way", unanswered, "pings", note="at the moment of looking")
    add("sockets", "connections that were lost", sum(each["lost"] for each in reports), "connections", goal=0)
    add("sockets", "slowest pong", max(each["slowest"] for each in reports) * 1000, "ms")
    add("sockets", "processor while they ping", busy * 100, "% of a core")


def _measure_burst(bench: Bench, load_processes: list[LoadProcess], sessions: list[str]) -> None:
    """Push through the channel, as a worker does. The database is not involved."""
    began_at = time.time()
    asyncio.run(_push(sessions))
    sent_after = time.time() - began_at
    wait_until(
        lambda: sum(load.report()["messages"] for load in load_processes) >= len(sessions),
        30,
        "the pushes",
        pause=0.05,
    )
    reports = [load.report() for load in load_processes]
    add, note = bench.figures.add, f"{len(sessions):,} at once, each into another chat"
    took = max(each["last_at"] for each in reports) - began_at
    add("sockets", "a burst of pushes: the last one is there", took, "s", goal=GOAL_BURST, note=note)
    add("sockets", "a burst of pushes: the last one is sent", sent_after, "s")
    add("sockets", "pushed twice", sum(each["twice"] for each in reports), "messages", goal=0)


async def _push(sessions: list[str]) -> None:
    from scheduling.channels.base import Delivered
    from scheduling.ids import new_id
    from sessions.inapp_channel import InApp

    channel, slots = InApp({}, timedelta(seconds=30)), asyncio.Semaphore(IN_FLIGHT)

    async def send(session: str) -> None:
        async with slots:
            outcome = await channel.send(_message(session, new_id()))
            assert isinstance(outcome, Delivered), outcome

    await asyncio.gather(*(send(session) for session in sessions))


def _message(session: str, key: Any) -> Any:
    from scheduling.channels.base import Message

    event = {"source": "/sessions", "id": f"{session}:1", "type": "session.silent", "time": None}
    return Message(key, key, f"user-of-{session}", "c1", "bench", "guide", "service", "", "您好，还在吗？", "", event)


class LoadProcess:
    def __init__(self, process: subprocess.Popen[str]) -> None:
        self.process = process

    def report(self) -> dict[str, Any]:
        assert self.process.stdin
        self.process.stdin.write("report\n")
        self.process.stdin.flush()
        return self.line()

    def line(self) -> dict[str, Any]:
        assert self.process.stdout
        return json.loads(self.process.stdout.readline())  # type: ignore[no-any-return]


@contextmanager
def _start_load(bench: Bench, prefix: str, count: int, port: int) -> Iterator[LoadProcess]:
    """Open `count` connections. Yields after every welcome frame."""
    wait_until(lambda: _listens(port), 60, "the web process")
    words = [sys.executable, "-m", "benchmarks.websocket_load", prefix, str(count), str(port), str(PING_EVERY)]
    process = subprocess.Popen(
        words, cwd=ROOT, env=bench.environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    try:
        load = LoadProcess(process)
        load.line()
        yield load
    finally:
        assert process.stdin
        process.stdin.close()
        stop_program(process)  # type: ignore[arg-type]


def _listens(port: int) -> bool:
    import socket

    with socket.socket() as tried:
        return tried.connect_ex(("127.0.0.1", port)) == 0


def _allow_files() -> None:
    """Raise the limit of open files, because each socket is a file."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
