"""Send the messages of the outbox from one thread of a worker process.

A pass wakes the thread every few seconds. It collects, claims, sends and settles until nothing has been due for
`LINGER`. Each subscription has its own requests in flight, so a slow receiver delays no other. Any number of processes
share the work; their claims are leases.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime, timedelta
from functools import cache, partial
from typing import Any, TypeVar

import structlog
from django.db import close_old_connections, connections

from scheduling import metrics, sql
from scheduling.channels.base import Failure, NotSent
from scheduling.channels.http_client import Transport, parse_retry_after
from scheduling.channels.webhook import read_secrets, sign_request
from scheduling.configuration import snapshot
from scheduling.policy.specs import WebhookSpec
from scheduling.webhooks.leases import (
    LEASE,
    AttemptResult,
    ClaimedMessage,
    SendableHook,
    claim_messages,
    find_sendable,
    settle_attempts,
)
from scheduling.webhooks.outbox import collect_messages

log = structlog.get_logger(__name__)
R = TypeVar("R")

TIMEOUT = timedelta(seconds=10)  #: of one request, from its claim to the end of the answer
MOST_IN_FLIGHT = 200  #: of one subscription in a process; the transport has as many connections to a host
PACE = 0.03  #: seconds between two turns of a subscription: results of that time share a statement
IDLE = 0.5  #: seconds between two looks for new events
LINGER = 15.0  #: seconds; longer than the interval of the pass that wakes the thread
#: A request that could not start by then is dropped, because another process may have the message after the lease.
LATEST_START = (LEASE - 2 * TIMEOUT).total_seconds()
RETRY_STATEMENTS = 1.0  #: seconds, while PostgreSQL is unavailable
Work = tuple[bool, list[tuple[WebhookSpec, SendableHook]]]  #: whether more events wait; subscriptions with due messages
NO_WORK: Work = (False, [])
Turn = tuple[list[ClaimedMessage], bool]  #: claimed messages; whether the results are stored
NOT_STORED: Turn = ([], False)


@cache
def outbox_sender() -> OutboxSender:
    """Return the sender of this process."""
    return OutboxSender()


class OutboxSender:
    def __init__(self, linger: float = LINGER) -> None:
        self._linger = linger
        self._stop = False
        self._thread: threading.Thread | None = None
        self._starting = threading.Lock()

    def wake(self) -> None:
        """Start the thread, unless it runs."""
        with self._starting:
            if not self._stop and (self._thread is None or not self._thread.is_alive()):
                self._thread = threading.Thread(target=self.run, name="webhooks", daemon=True)
                self._thread.start()

    def finish(self, timeout: float) -> None:
        """Claim nothing more, and wait until what is in flight is settled. Leases return the rest."""
        self._stop = True
        if self._thread is not None:
            self._thread.join(timeout)

    def run(self) -> None:
        """Send until nothing has been due for the linger time, or `finish` is called."""
        try:
            asyncio.run(_Turns(lambda: self._stop, self._linger).serve())
        except Exception:
            log.exception("webhook_sender_failed")


class _Turns:
    """The event loop of a sender. One thread runs all statements, on one connection."""

    def __init__(self, stopping: Callable[[], bool], linger: float) -> None:
        self._stopping = stopping
        self._linger = linger
        self._statements = ThreadPoolExecutor(1, "webhook-statements")
        self._transport = Transport.from_settings()
        self._lanes: dict[int, asyncio.Task[None]] = {}
        self._busy_at = time.monotonic()
        self._unusable: dict[int, WebhookSpec] = {}  #: their secrets cannot be decrypted here

    async def serve(self) -> None:
        try:
            while not self._stopping():
                more, hooks = await self._call(_look_for_work, default=NO_WORK)
                self._lanes = {hook: lane for hook, lane in self._lanes.items() if not lane.done()}
                for spec, each in hooks:
                    if spec.id not in self._lanes and self._unusable.get(spec.id) is not spec:
                        limit = 1 if each.probing else MOST_IN_FLIGHT
                        self._lanes[spec.id] = asyncio.create_task(self._drain(spec, limit))
                await asyncio.sleep(PACE if more else IDLE)
                if more or not self._is_idle():
                    self._busy_at = time.monotonic()
                elif time.monotonic() - self._busy_at > self._linger:
                    break
            await asyncio.gather(*self._lanes.values())
        finally:
            await self._transport.close()
            self._statements.submit(connections.close_all)
            self._statements.shutdown()

    def _is_idle(self) -> bool:
        return all(lane.done() for lane in self._lanes.values())

    async def _call(self, act: Callable[[], R], default: R) -> R:
        try:
            return await asyncio.get_running_loop().run_in_executor(self._statements, _on_usable_connection, act)
        except sql.UNAVAILABLE_ERRORS as error:
            log.warning("database_unavailable", error=str(error))
        except Exception:
            log.exception("webhook_pass_failed")
        await asyncio.sleep(RETRY_STATEMENTS)
        return default

    async def _drain(self, hook: WebhookSpec, limit: int) -> None:
        """Send due messages of one subscription until none can be claimed, or its receiver has to rest."""
        try:
            post = partial(self._attempt, hook, read_secrets(hook.config), str(hook.config["url"]))
        except Exception:  # secrets that this server cannot decrypt: another one may send
            log.exception("webhook_unusable", webhook=hook.key)
            self._unusable[hook.id] = hook
            return
        flying: set[asyncio.Task[AttemptResult]] = set()
        results: list[AttemptResult] = []
        claimed: list[ClaimedMessage]
        halted = False
        while True:
            landed = {each for each in flying if each.done()}
            flying -= landed
            results += [each.result() for each in landed]
            halted = halted or self._stopping() or _must_rest(results)
            if any(each.outcome == "delivered" for each in results):
                limit = MOST_IN_FLIGHT
            room = 0 if halted else limit - len(flying)
            claimed, stored = [], True
            if results or room > 0:
                act = partial(_settle_and_claim, hook, tuple(results), room)
                claimed, stored = await self._call(act, default=NOT_STORED)
            results = [] if stored else results
            if claimed:
                self._busy_at = time.monotonic()
            flying |= {asyncio.create_task(post(each, time.monotonic())) for each in claimed}
            if not flying and not results and (halted or not claimed):
                return
            if flying:
                await asyncio.wait(flying, timeout=PACE)
            if self._stopping() and not stored:
                return  # the leases return them

    async def _attempt(
        self, hook: WebhookSpec, secrets: tuple[str, ...], url: str, message: ClaimedMessage, claimed_at: float
    ) -> AttemptResult:
        if time.monotonic() - claimed_at > LATEST_START:
            return AttemptResult(message.id, message.attempt, "released")
        body = build_body(message)
        headers = sign_request(message.message_id, body, datetime.now(UTC), secrets)
        outcome: dict[str, Any]
        try:
            response = await self._transport.request("POST", url, body, headers, timeout=TIMEOUT, repeatable=True)
        except NotSent as failure:
            outcome = {"outcome": "released" if failure.reason == "busy" else "failed", "problem": str(failure)}
        except Failure as failure:
            outcome = {"outcome": "failed", "problem": str(failure)}
        except Exception as error:
            log.exception("webhook_attempt_failed", webhook=hook.key)
            outcome = {"outcome": "failed", "problem": type(error).__name__}
        else:
            delivered = 200 <= response.status < 300
            wait = None if delivered or response.status not in (429, 503) else parse_retry_after(response)
            outcome = {
                "outcome": "delivered" if delivered else "failed", "status": response.status, "retry_after": wait,
                "problem": "" if delivered else f"http_{response.status}", "gone": response.status == 410,
            }  # fmt: skip
        metrics.count_webhook_attempt(hook.key, outcome["outcome"])
        return AttemptResult(message.id, message.attempt, **outcome)


def build_body(message: ClaimedMessage) -> bytes:
    """Return `{type, timestamp, data}` as UTF-8 JSON. `timestamp` is when it happened, the same in each attempt."""
    at = message.occurred_at.astimezone(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
    return f'{{"type":"{message.type}","timestamp":"{at}","data":{message.data}}}'.encode()


def _must_rest(results: list[AttemptResult]) -> bool:
    """Return whether to send nothing more for now: the receiver asks for it, or all that has ended failed."""
    failed = [each for each in results if each.outcome == "failed"]
    return any(each.retry_after or each.gone for each in failed) or (bool(failed) and len(failed) == len(results))


def _on_usable_connection(act: Callable[[], R]) -> R:
    close_old_connections()
    return act()


def _look_for_work() -> Work:
    config = snapshot.current()
    if not config.webhooks:
        return NO_WORK
    more = collect_messages()
    return more, [(config.webhooks[each.id], each) for each in find_sendable(list(config.webhooks))]


def _settle_and_claim(hook: WebhookSpec, results: tuple[AttemptResult, ...], room: int) -> Turn:
    if results:
        settle_attempts(hook.id, hook.version, results)
    return (claim_messages(hook.id, hook.version, room) if room > 0 else []), True
