import asyncio
import logging
import threading
from datetime import timedelta

import pytest
from redis import Redis

from scheduling.channels.base import NoAnswer, NotSent
from scheduling.channels.vendors.base import Token, TokenCache, TokenRefused
from scheduling.redis_client import connect_redis
from tests.scheduling.channels.conftest import age_tokens, own_database
from tests.support.second_connection import run_concurrently
from tests.support.tables import each_row

LIMIT = timedelta(seconds=60)
HOURS = timedelta(hours=2)


class Vendor:
    """Counts the fetches of all processes."""

    def __init__(self, lifetime=HOURS, delay=0.0):
        self.fetches = 0
        self.lifetime = lifetime
        self.delay = delay
        self.error = None
        self._counting = threading.Lock()

    async def __call__(self):
        with self._counting:
            self.fetches += 1
            text = f"secret-token-{self.fetches}"
        await asyncio.sleep(self.delay)
        if self.error:
            raise self.error
        return Token(text, self.lifetime)


def connect(server, count=1):
    """Each cache has a memory and connections of its own, as each process has."""
    return [TokenCache(Redis.from_url(own_database())) for _ in range(count)]


def test_token_32_processes_with_10_messages_each_fetch_once(server):
    vendor, caches = Vendor(delay=0.2), connect(server, 32)

    async def ask(cache):
        return await asyncio.gather(*(cache.get("a", vendor, LIMIT) for _ in range(10)))

    answers = run_concurrently(32, lambda number: asyncio.run(ask(caches[number])))
    found = {token for tokens in answers for token in tokens}
    assert (found, vendor.fetches) == ({"secret-token-1"}, 1)

    # All of them learn at once that the vendor has ended the token.
    age_tokens(server)
    refresh = [cache.get("a", vendor, LIMIT, stale="secret-token-1") for cache in caches]
    found = set(run_concurrently(32, lambda number: asyncio.run(refresh[number])))
    assert (found, vendor.fetches) == ({"secret-token-2"}, 2)


async def test_token_is_stored_encrypted_and_expires_before_the_vendors(server, caplog):
    caplog.set_level(logging.DEBUG)
    (cache,) = connect(server)

    token = await cache.get("corp\0secret", Vendor(), LIMIT)

    stored = {key: server.get(key) for key in server.keys("*")}
    assert token == "secret-token-1"
    assert all(token not in (value or "") and "corp" not in key for key, value in stored.items())
    assert 6_890_000 < server.pttl(next(iter(stored))) <= 6_900_000
    assert token not in caplog.text


async def test_token_short_life_is_fetched_again_after_its_end(server):
    (cache,) = connect(server)
    vendor = Vendor(lifetime=timedelta(milliseconds=200))

    first = await cache.get("a", vendor, LIMIT)

    async with asyncio.timeout(30):  # less than a process remembers a token of a long life
        while await cache.get("a", vendor, LIMIT) == first:
            await asyncio.sleep(0.01)


@each_row("error", [TokenRefused("token_refused", "40001"), NoAnswer("timeout"), NotSent("connect")])
async def test_token_failed_fetch_is_shared_and_never_unknown(server, error):
    server.flushdb()
    vendor = Vendor()
    vendor.error = error
    for cache in connect(server, 5):
        with pytest.raises(TokenRefused) as caught:
            await cache.get("a", vendor, LIMIT)
        assert caught.value.outcome().retry_after == timedelta(seconds=10)
    assert vendor.fetches == 1


async def test_token_refused_right_after_its_fetch_is_not_fetched_again(server):
    vendor, (first, second) = Vendor(), connect(server, 2)
    token = await first.get("a", vendor, LIMIT)
    for cache in (first, second):
        with pytest.raises(TokenRefused):
            await cache.get("a", vendor, LIMIT, stale=token)
    assert vendor.fetches == 1


async def test_token_vendor_that_repeats_the_refused_token_raises(server):
    (cache,) = connect(server)

    async def same():
        return Token("secret-token-1", HOURS)

    await cache.get("a", same, LIMIT)
    age_tokens(server)
    with pytest.raises(TokenRefused):
        await cache.get("a", same, LIMIT, stale="secret-token-1")


async def test_token_lock_of_a_killed_process_ends(server):
    (cache,) = connect(server)
    vendor = Vendor()
    await cache.get("a", vendor, LIMIT)
    (name,) = server.keys("at:token:*")
    server.delete(name)
    server.set(f"{name}:lock", "of a killed process", px=300)
    (other,) = connect(server)

    assert await other.get("a", vendor, LIMIT) == "secret-token-2"


async def test_token_without_redis_is_not_sent():
    cache = TokenCache(connect_redis("redis://127.0.0.1:1/0", timeout=1))
    with pytest.raises(NotSent, match="token_unavailable"):
        await cache.get("a", Vendor(), LIMIT)


async def test_token_slow_vendor_ends_at_the_limit(server):
    (cache,) = connect(server)
    vendor = Vendor(delay=30)
    with pytest.raises(NotSent, match="token_unavailable"):
        await cache.get("a", vendor, timedelta(milliseconds=300))
    assert not server.keys("*:lock")
