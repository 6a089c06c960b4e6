"""Wakes when a session falls silent, and hands the silence in. Any number of watchers share the work.

A pass claims what is due under a lease, records it, and confirms. Dying anywhere in it costs nothing: what was not
confirmed is claimed again when its lease ends, and what was recorded is not recorded twice.
"""

from __future__ import annotations

import threading
from datetime import timedelta

import structlog
from django.conf import settings
from django.db import InterfaceError, OperationalError, close_old_connections

from sessions import activity, policies
from sessions.hand_in import hand_in, undelivered
from sessions.keys import SHARDS
from sessions.pace import Backoff, Bucket, Every
from sessions.server import StoreAway
from sessions.store import Claim, Claims, Store

log = structlog.get_logger(__name__)

BATCH = 500  #: silences a pass
LEASE = timedelta(seconds=30)  #: a pass takes a fraction of a second; this outlasts a database that restarts
LONGEST_SLEEP = 1.0  #: seconds; thresholds are at least twice that, so nothing new falls due while it sleeps
BREATH = 0.02  #: seconds between passes, so that what falls due in that time goes in one transaction
HOUSEKEEPING = 2.0  #: seconds between looks at policies, activity and backlog


class Watcher:
    def __init__(self, store: Store, stop: threading.Event) -> None:
        self.store = store
        self.stop = stop
        self.held: list[Claim] = []  #: claimed and not yet handed in
        self._backoff = Backoff(0.1, 2.0)
        self._allowance = Bucket(settings.AFTERTOUCH_SILENCE_RATE)
        self._housekeeping = Every(HOUSEKEEPING)
        self._backlog_look = Every(1.0)
        self._full = False

    def run(self) -> None:
        """Until `stop` is set; then what is claimed goes back."""
        log.info("watcher_started", shards=SHARDS)
        while not self.stop.is_set():
            self.stop.wait(self._pass_safely())
        self.give_back()
        log.info("watcher_stopped")

    def _pass_safely(self) -> float:
        """One pass; what is away is waited for. Returns how many seconds to sleep."""
        try:
            pause = self.run_once()
        except StoreAway as error:
            log.warning("store_away", error=str(error))
            return self._backoff.next()
        except (OperationalError, InterfaceError) as error:
            log.warning("database_away", error=str(error))
            self.give_back()
            close_old_connections()
            return self._backoff.next()
        self._backoff.reset()
        return pause

    def run_once(self) -> float:
        """Claim, hand in, confirm. Returns how many seconds there is nothing to do."""
        if self._housekeeping.is_due():
            close_old_connections()
            self._keep_house()
        if self._is_full():
            return BREATH * 5
        limit = self._allowance.take(BATCH)
        if limit < SHARDS:
            self._allowance.give_back(limit)
            return BREATH
        share = -(-limit // SHARDS)
        claims = self.store.claim_silent(share, LEASE)
        self._allowance.give_back(limit - len(claims.silences))
        self.settle(claims)
        return self._sleep(claims, share)

    def settle(self, claims: Claims) -> None:
        self.held = claims.silences
        if self.held and not self.stop.is_set():
            self.store.confirm(hand_in(self.held, claims.now_ms))
            self.held = []

    def give_back(self) -> None:
        """Let somebody else take what we hold at once. Where that fails, the lease does it."""
        held, self.held = self.held, []
        try:
            if held:
                self.store.release(held)
        except StoreAway as error:
            log.warning("claims_not_given_back", count=len(held), error=str(error))

    def _keep_house(self) -> None:
        wanted = policies.current()
        if self.store.versions() != {wanted.version}:
            log.info("policies_pushed", version=wanted.version)
            self.store.push(wanted)
        activity.note(self.store)

    def _is_full(self) -> bool:
        """Whether so much is undelivered that more would only wait elsewhere. Looked at once a second."""
        if self._backlog_look.is_due():
            bound = settings.AFTERTOUCH_SILENCE_BACKLOG
            full = undelivered(bound) >= bound
            if full != self._full:
                log.warning("backlog_full" if full else "backlog_over", bound=bound)
            self._full = full
        return self._full

    @staticmethod
    def _sleep(claims: Claims, share: int) -> float:
        return min(max(claims.seconds_to_next, BREATH), LONGEST_SLEEP)
