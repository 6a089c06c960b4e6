"""Measure the stream of a gateway: frames of many users over one connection, on one web process."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import redis

from benchmarks import chats
from benchmarks.environment import Bench, wait_until
from benchmarks.scenarios.sockets import WEB, _listens
from config.local.processes import select_port
from examples.gateway_client import GatewayClient
from scheduling.models import ApiKey
from scheduling.operations.commands import create_api_key

GOAL_RATE, GOAL_COST = 20_000.0, 50.0
BATCH, SESSIONS = 400, 20_000  #: a batch has about 60 KB


def gateway(bench: Bench) -> None:
    frames = bench.size(400_000, 40_000)
    chats.store_policies()
    ApiKey.objects.filter(name="bench").delete()
    key = create_api_key("bench", ["sessions"])
    client = redis.Redis.from_url(bench.endpoints.redis_url)
    for repetition in range(bench.repeat):
        port = select_port()
        with bench.running(*WEB, "--port", str(port)) as web:
            wait_until(lambda port=port: _listens(port), 60, "the web process")
            asyncio.run(_send(port, key, SESSIONS, f"{repetition}-warm"))
            burnt, redis_burnt, began_at = sum(web.cpu_times()[:2]), _processor_time(client), time.monotonic()
            acks = asyncio.run(_send(port, key, frames, str(repetition)))
            seconds, took = time.monotonic() - began_at, sum(web.cpu_times()[:2]) - burnt
            redis_took = _processor_time(client) - redis_burnt
        add, note = bench.figures.add, f"{BATCH} a batch, {SESSIONS:,} sessions, one connection"
        add("gateway", "frames", frames / seconds, "/s", goal=GOAL_RATE, at_least=True, note=note)
        add("gateway", "processor time of a frame", took / frames * 1e6, "µs", goal=GOAL_COST, note="web process")
        add("gateway", "Redis' processor time of a frame", redis_took / frames * 1e6, "µs")
        add("gateway", "frames not counted", frames - sum(ack["counted"] for ack in acks), "frames", goal=0)


async def _send(port: int, key: str, count: int, epoch: str) -> list[dict[str, Any]]:
    acks: list[dict[str, Any]] = []
    async with GatewayClient(f"http://127.0.0.1:{port}", key, acks.append) as client:
        for first in range(0, count, BATCH):
            await client.send([_frame(number, epoch) for number in range(first, first + BATCH)])
        await client.flush()
    return acks


def _frame(number: int, epoch: str) -> dict[str, Any]:
    """Of each session a message, then pings."""
    session, seq = number % SESSIONS, number // SESSIONS
    kind = "ping" if seq else "message"
    return {
        "session_id": f"session-{session:08}", "user_id": f"user-{session:08}", "kind": kind, "seq": seq,
        "epoch": epoch, "tag": chats.LONG,
    }  # fmt: skip


def _processor_time(client: redis.Redis) -> float:
    found = client.info("cpu")
    return float(found["used_cpu_user"] + found["used_cpu_sys"])
