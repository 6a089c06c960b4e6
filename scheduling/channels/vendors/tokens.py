"""Share the access tokens of vendor accounts between all processes, and fetch each one once.

Redis holds a token encrypted, for a shorter time than the vendor does. The process that takes the lock fetches; the
others wait for its result. A failed fetch is shared for some seconds too, so that a wrong secret does not become a
request for each message.
"""

from __future__ import annotations

import asyncio
import json
import os
import secrets
import time
from collections import defaultdict
from collections.abc import Awaitable, Callable
from datetime import timedelta
from functools import cache
from hashlib import sha256
from typing import Any, NamedTuple, TypeVar
from weakref import WeakKeyDictionary

from django.conf import settings

from scheduling.channels.base import Failure, NotSent, Transient
from scheduling.channels.kinds import thread_pool
from scheduling.models.encrypted import Unreadable, decrypt_text, encrypt_text
from scheduling.redis_client import Redis, RedisError, connect_redis

FAILURE_KEPT = timedelta(seconds=10)  #: a failed fetch is not repeated within this time
YOUNGEST_REFRESHED = timedelta(seconds=10)  #: a refused token that is younger is not fetched again
EARLY = timedelta(minutes=5)  #: a token is replaced this long before its end, or after nine tenths of its life
FORGOTTEN_AFTER = timedelta(minutes=1)  #: time that a process uses a token without asking Redis
POLL = 0.05  # seconds between two looks for the token that another process fetches
LOCK_MARGIN = timedelta(seconds=2)  #: the lock outlasts the fetch, which ends at the deadline
THREADS = 4

Answer = TypeVar("Answer")

_UNLOCK = "if redis.call('GET', KEYS[1]) == ARGV[1] then redis.call('DEL', KEYS[1]) end"


class Token(NamedTuple):
    """An access token and how long the vendor accepts it."""

    text: str
    lifetime: timedelta


#: Fetch a token. The argument is the refused one, or "". Raises `Failure`.
Fetch = Callable[[str], Awaitable[Token]]


class TokenRefused(Failure):
    """The vendor gave no token. The message was not sent; it may be sent once the account is in order."""

    def outcome(self) -> Transient:
        return Transient(self.reason, self.detail, FAILURE_KEPT)


class TokenCache:
    """The tokens of all accounts. Methods run in one event loop; Redis is called in threads."""

    def __init__(self, client: Redis) -> None:
        self._redis = client
        self._known: dict[str, tuple[str, float]] = {}  # token, monotonic time until which Redis is not asked
        self._locks: WeakKeyDictionary[asyncio.AbstractEventLoop, defaultdict[str, asyncio.Lock]] = WeakKeyDictionary()

    async def get(self, account: str, fetch: Fetch, limit: timedelta, stale: str = "") -> str:
        """Return the token of an account within `limit`. `stale` is a token that the vendor has refused.

        One process fetches, once. The result of a fetch is never the `stale` token.

        Raises:
            TokenRefused: the vendor gives no token, or refused a token of less than ten seconds.
            NotSent: Redis does not answer, or another process fetches for longer than `limit`.
        """
        loop = asyncio.get_running_loop()
        local = self._locks.setdefault(loop, defaultdict(asyncio.Lock))[account]
        try:
            async with asyncio.timeout(limit.total_seconds()), local:
                text, until = self._known.get(account, ("", 0.0))
                if text and text != stale and time.monotonic() < until:
                    return text
                return await self._share(account, fetch, limit, stale)
        except TimeoutError:
            raise NotSent("token_unavailable", "no access token within the time limit") from None
        except RedisError as error:
            raise NotSent("token_unavailable", f"Redis: {type(error).__name__}") from None

    async def _share(self, account: str, fetch: Fetch, limit: timedelta, stale: str) -> str:
        name = f"at:token:{{{sha256(account.encode()).hexdigest()[:32]}}}"
        mine = secrets.token_hex(8)
        while not (text := await self._run(self._read, account, name, stale)):
            if await self._run(self._lock, name, mine, limit + LOCK_MARGIN):
                try:
                    # Another process may have stored its token between the read and the lock.
                    return await self._run(self._read, account, name, stale) or await self._fetch(
                        account, name, fetch, stale
                    )
                finally:
                    await asyncio.shield(self._run(self._unlock, name, mine))
            await asyncio.sleep(POLL)
        return text

    async def _fetch(self, account: str, name: str, fetch: Fetch, stale: str) -> str:
        try:
            token = await fetch(stale)
            if token.text == stale:
                raise TokenRefused("token_refused", "the vendor refuses the token that it gives")
        except Failure as failure:
            refused = failure if isinstance(failure, TokenRefused) else TokenRefused("token_failed", str(failure))
            kept = json.dumps({"reason": refused.reason, "detail": refused.detail})
            await self._run(self._store, f"{name}:failed", kept, FAILURE_KEPT)
            raise refused from None
        lifetime = token.lifetime - min(EARLY, token.lifetime / 10)
        stored = json.dumps({"token": token.text, "milliseconds": lifetime // timedelta(milliseconds=1)})
        await self._run(self._store, name, stored, lifetime)
        self._remember(account, token.text, lifetime)
        return token.text

    def _remember(self, account: str, text: str, lifetime: timedelta) -> None:
        self._known[account] = (text, time.monotonic() + min(lifetime, FORGOTTEN_AFTER).total_seconds())

    # --- in a thread ----------------------------------------------------------------------------------------------

    def _read(self, account: str, name: str, stale: str) -> str:
        """Return the shared token, or "" if a process must fetch one. Raises `TokenRefused`."""
        with self._redis.pipeline(transaction=False) as pipe:
            pipe.get(name)
            pipe.pttl(name)
            pipe.get(f"{name}:failed")
            kept, left, failed = pipe.execute()
        found = _decrypt_entry(kept)
        text = str(found.get("token", ""))
        if text and text != stale and left > 0:
            self._remember(account, text, timedelta(milliseconds=left))
            return text
        if failure := _decrypt_entry(failed):
            raise TokenRefused(failure["reason"], failure["detail"])
        if text and left > 0 and found["milliseconds"] - left < YOUNGEST_REFRESHED // timedelta(milliseconds=1):
            raise TokenRefused("token_refused", "the vendor refuses a token that it has just given")
        return ""

    def _store(self, name: str, text: str, kept: timedelta) -> None:
        self._redis.set(name, encrypt_text(text), px=max(1, kept // timedelta(milliseconds=1)))

    def _lock(self, name: str, mine: str, kept: timedelta) -> bool:
        return bool(self._redis.set(f"{name}:lock", mine, nx=True, px=kept // timedelta(milliseconds=1)))

    def _unlock(self, name: str, mine: str) -> None:
        self._redis.eval(_UNLOCK, 1, f"{name}:lock", mine)

    @staticmethod
    async def _run(act: Callable[..., Answer], *arguments: Any) -> Answer:
        return await asyncio.get_running_loop().run_in_executor(thread_pool("tokens", THREADS), act, *arguments)


def _decrypt_entry(stored: bytes | None) -> dict[str, Any]:
    """Return a stored entry. One of a key that was replaced counts as absent."""
    try:
        return json.loads(decrypt_text(stored)) if stored else {}
    except (Unreadable, ValueError):
        return {}


def shared_tokens() -> TokenCache:
    """Return the token cache of this process."""
    return connect_tokens(os.getpid())


@cache
def connect_tokens(process: int) -> TokenCache:
    """Return a token cache with a connection of its own for a process id, since a fork must not share one."""
    return TokenCache(connect_redis(settings.REDIS_URL, timeout=settings.TIMEOUTS.redis_quota))
