"""Connect once by each client of the product, as it is set. Print a JSON object: client, "" or its error."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Callable
from functools import partial
from typing import Any
from unittest.mock import Mock

import django
from asgiref.sync import async_to_sync


def main() -> None:
    django.setup()
    from config.celery.application import app

    app.set_current()
    found = {name: attempt(connect) for name, connect in CLIENTS.items()}
    sys.stdout.write(json.dumps(found))


def attempt(connect: Callable[[], Any]) -> str:
    try:
        connect()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


def connect_quota() -> None:
    from django.conf import settings

    from scheduling.redis_client import connect_redis

    with connect_redis(settings.REDIS_URL) as client:
        client.ping()


def connect_takeover() -> None:
    from django.conf import settings

    from scheduling.redis_client import connect_redis_async

    async def ping() -> None:
        async with connect_redis_async(settings.REDIS_URL) as client:
            await client.ping()

    asyncio.run(ping())


def connect_chats() -> None:
    from sessions.store.sessions import live_store

    live_store().server.ask(lambda pipe: pipe.ping())


def connect_gateway() -> None:
    from sessions.detection.expired_keys import ExpirySubscriptions, gateway_server

    ExpirySubscriptions(gateway_server()).close()


@async_to_sync
async def connect_hub() -> None:
    from sessions.websocket.hub import hub
    from tests.support.chat_hub import close_hub

    told: asyncio.Queue[Any] = asyncio.Queue()
    await hub().join("tls", Mock(side="user", ticket=1, on_notification=told.put_nowait))
    await hub().notify("tls", {"what": "greeting"})
    async with asyncio.timeout(30):
        assert await told.get() == {"what": "greeting"}
    await close_hub()


def connect_broker() -> None:
    from scheduling import broker_health

    with broker_health.connect_broker(5.0) as connection:
        assert connection.connected


def publish() -> None:
    from config.celery.application import app

    app.send_task("nobody.knows", queue="nobody", ignore_result=True)


def probe(part: str) -> None:
    from django.test import Client

    state = Client().get("/health/ready").json()[part]
    assert state["status"] == "ok", state


def open_flower() -> None:
    """As its page of the broker does. Its events come by the connection of `connect_broker`."""
    from flower.utils.broker import Broker

    from config.celery.application import app

    with app.connection() as connection:
        address = connection.as_uri(include_password=True)
    options = {"broker_options": app.conf.broker_transport_options, "broker_use_ssl": app.conf.broker_use_ssl}

    async def count() -> None:
        assert [each["name"] for each in await Broker(address, http_api=None, **options).queues(["ticks"])] == ["ticks"]

    asyncio.run(count())


CLIENTS: dict[str, Callable[[], Any]] = {
    "quota": connect_quota, "takeover": connect_takeover, "chats": connect_chats, "gateway": connect_gateway,
    "hub": connect_hub, "broker": connect_broker, "publish": publish, "redis probe": partial(probe, "redis"),
    "broker probe": partial(probe, "broker"), "flower": open_flower,
}  # fmt: skip

if __name__ == "__main__":
    main()
