"""Measure ingest: events over HTTP into PostgreSQL, in batches and one per request. Each plans a touch."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from itertools import count
from urllib.error import URLError
from urllib.request import urlopen

import aiohttp

from benchmarks import workload
from benchmarks.environment import Bench, processor_seconds, wait_until
from benchmarks.results import percentile
from scheduling.models import ApiKey, Event, Touch
from scheduling.operations.commands import create_api_key

BATCH = 500
GOAL_BATCHED = 5_000.0
GOAL_SINGLY = 500.0
GOAL_P99 = 150.0
AT_ONCE_BATCHED = 4
AT_ONCE_SINGLY = 32
SENDERS = 50_000
WEB = (
    "uvicorn", "config.asgi:application", "--host", "127.0.0.1",
    "--http", "config.http_protocol:BoundedHttpProtocol",
    "--ws", "websockets-sansio", "--workers", "2",
    "--log-level", "warning", "--port",
)  # fmt: skip


def intake(bench: Bench) -> None:
    batches, singles = bench.size(80, 10), bench.size(5_000, 500)
    workload.create_matrix()
    ApiKey.objects.filter(name="bench").delete()
    key = create_api_key("bench", ["events"], rate_per_minute=100_000_000)
    base = bench.environment["AFTERTOUCH_BASE_URL"]
    with bench.running(*WEB, bench.environment["AFTERTOUCH_PORT"]) as web:
        involved = [web, *bench.servers.values()]
        wait_until(lambda: _is_live(base), 60, "the web server")
        for number in range(bench.repeat):
            workload.delete_all()
            events = _events(f"run-{number}")
            asyncio.run(_measure_intake(bench, base, key, events, 4, 200))
            before = Event.objects.count()
            spent = processor_seconds(involved)
            seconds, _ = asyncio.run(_measure_intake(bench, base, key, events, batches, 0))
            spent = processor_seconds(involved) - spent
            _check_stored(before + batches * BATCH)
            add = bench.figures.add
            add("intake", "in batches of 500", batches * BATCH / seconds, "/s", goal=GOAL_BATCHED, at_least=True,
                note="two server processes, each event stored with its customer and a touch")  # fmt: skip
            add("intake", "in batches: processor time each", spent / (batches * BATCH) * 1e6, "µs",
                note="web, PostgreSQL and Valkey, without the sender")  # fmt: skip
            seconds, took = asyncio.run(_measure_intake(bench, base, key, events, 0, singles))
            _check_stored(before + batches * BATCH + singles)
            add("intake", "one a request", singles / seconds, "/s", goal=GOAL_SINGLY, at_least=True,
                note=f"{AT_ONCE_SINGLY} at once")  # fmt: skip
            add("intake", "one a request: p50", percentile(took, 50) * 1000, "ms")
            add("intake", "one a request: p99", percentile(took, 99) * 1000, "ms", goal=GOAL_P99)


async def _measure_intake(
    bench: Bench, base: str, key: str, events: Iterator[dict[str, object]], batches: int, singles: int
) -> tuple[float, list[float]]:
    """Send the requests. Returns the total seconds and the seconds of each answer."""
    took: list[float] = []
    bodies = [
        *(("application/cloudevents-batch+json", [next(events) for _ in range(BATCH)]) for _ in range(batches)),
        *(("application/cloudevents+json", next(events)) for _ in range(singles)),
    ]
    waiting = iter(bodies)
    connector = aiohttp.TCPConnector(limit=0)
    headers = {"Authorization": f"Bearer {key}"}
    async with aiohttp.ClientSession(base, connector=connector, headers=headers) as client:

        async def send() -> None:
            for kind, body in waiting:
                began_at = time.perf_counter()
                async with client.post("/api/v1/events", json=body, headers={"Content-Type": kind}) as answer:
                    text = await answer.text()
                took.append(time.perf_counter() - began_at)
                if answer.status != 202:
                    raise AssertionError(f"{answer.status}: {text[:500]}")

        began_at = time.perf_counter()
        await asyncio.gather(*(send() for _ in range(AT_ONCE_SINGLY if singles else AT_ONCE_BATCHED)))
        return time.perf_counter() - began_at, took


def _events(source: str) -> Iterator[dict[str, object]]:
    for number in count():
        yield {
            "specversion": "1.0",
            "id": f"{source}-{number}",
            "source": "bench",
            "type": "bench.guide-0",
            "subject": f"user-{number * 7919 % SENDERS}",
            "data": {"chat_id": f"chat-{number % 500}", "item": "Aftertouch", "order": number},
        }


def _check_stored(expected: int) -> None:
    """Check that every accepted event is stored with its touch."""
    assert Event.objects.count() == expected == Touch.objects.count()


def _is_live(base: str) -> bool:
    try:
        with urlopen(f"{base}/health/live", timeout=2) as answer:
            return bool(answer.status == 200)
    except (URLError, OSError):
        return False
