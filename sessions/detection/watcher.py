"""Detect silent sessions and record their silences. Any number of watchers share the work.

A pass claims silences under a lease, records them, and confirms them. A crash loses nothing: an unconfirmed claim is
claimed again after its lease, and recording is idempotent.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from datetime import datetime, timedelta
from functools import partial

import structlog
from django.conf import settings
from django.db import close_old_connections

from scheduling import sql
from scheduling.planning.own_events import update_last_active
from sessions.detection import policies
from sessions.detection.silence_events import brief_transaction, count_undelivered, record_silences
from sessions.rates import Backoff, Bucket, Every
from sessions.store import stats
from sessions.store.client import SHARDS, StoreUnavailable
from sessions.store.sessions import ClaimedSilence, ClaimedSilences, Store

log = structlog.get_logger(__name__)


ACTIVITY_BATCH = 300  #: customers per pass, between two checks of deadlines; repeated while more wait


def store_activity(store: Store) -> int:
    """Store the activity of some customers in PostgreSQL. Idempotent after a crash. Returns the number of customers."""
    by_shard = store.active_users(ACTIVITY_BATCH)
    if not by_shard:
        return 0
    seen: dict[str, datetime] = {}
    for users in by_shard.values():  # a customer can have sessions in several shards
        seen |= {user_id: max(at, seen.get(user_id, at)) for user_id, at in users.items()}
    with brief_transaction():
        noted = update_last_active(seen)
    done = {shard: noted & users.keys() for shard, users in by_shard.items()}
    if noted:
        store.clear_active({shard: users for shard, users in done.items() if users})
    return len(noted)


BATCH = 500  #: silences per pass
#: A pass takes a fraction of a second. Another watcher records the silences of a frozen one within 30 s, waits for its
#: locks included.
LEASE = timedelta(seconds=20)
LOCKED_RETRY = 5.0  #: seconds
LONGEST_SLEEP = 1.0  #: seconds; thresholds are at least twice this, so no new deadline passes during the sleep
MIN_PASS_INTERVAL = 0.02  #: seconds between passes, so that deadlines of this period share a transaction
HOUSEKEEPING = 2.0  #: seconds between checks of policies and activity


class Watcher:
    """The detection loop of one process. `run` returns after `stop` is set."""

    def __init__(self, store: Store, stop: threading.Event) -> None:
        self.store = store
        self.stop = stop
        self.held: list[ClaimedSilence] = []  #: claimed and not yet recorded
        self._locked: list[ClaimedSilence] = []  #: not recorded because of locks; released by the housekeeping
        self.report = stats.WatcherReport()
        self._room = settings.AFTERTOUCH_SILENCE_BACKLOG  #: how many more silences may be undelivered
        self._versions: frozenset[str] = frozenset()  #: of the policies in the store
        self._turn = 0  #: first shard of the next pass, where the limit does not cover all shards
        self._backoff = Backoff(0.1, 2.0)
        self._allowance = Bucket(settings.AFTERTOUCH_SILENCE_RATE)
        self.housekeeping = Every(HOUSEKEEPING)
        self._more_activity = False  #: more activity waits than fits into a pass
        self._rearming = False  #: a campaign may have begun
        self.backlog_counts = Every(1.0)
        self._retrying = Every(LOCKED_RETRY)

    def run(self) -> None:
        """Run passes until `stop` is set. Then return the claims."""
        log.info("watcher_started")
        while not self.stop.is_set():
            self.stop.wait(self._pass_safely())
        self.release_claims()
        log.info("watcher_stopped", handed_in=self.report.handed_in)

    def _pass_safely(self) -> float:
        """Run one pass and handle its errors. Returns the seconds to sleep; backs off while a server is unavailable."""
        try:
            pause = self.run_once()
        except StoreUnavailable as error:
            log.warning("store_unavailable", error=str(error))
            return self._backoff.next()
        except sql.UNAVAILABLE_ERRORS as error:
            log.warning("database_unavailable", error=str(error))
        except Exception:
            # A defect in one pass must not stop detection.
            log.exception("pass_failed")
        else:
            self._backoff.reset()
            return pause
        self.release_claims()
        close_old_connections()
        return self._backoff.next()

    def run_once(self) -> float:
        """Claim, record and confirm; run housekeeping when due. Returns the seconds to sleep."""
        try:
            limit = min(self._allowance.left(BATCH), self._backlog_capacity())
            pause = self._claim_and_record(limit) if limit > 0 else MIN_PASS_INTERVAL * 5
        except Exception:
            # A watcher that waits for a server is still a running watcher.
            if self.housekeeping.is_due():
                _run_step(self._send_report)
            raise
        if self.housekeeping.is_due():
            # Run each step, also after the failure of another one.
            close_old_connections()
            # `shards` removes expired pauses, also where no page reads the counts.
            delete_pauses = partial(self.store.shards, partly=True)
            for step in (
                self._release_locked, self._push_policies, self._note_activity, delete_pauses, self._send_report,
            ):  # fmt: skip
                _run_step(step)
        elif self._more_activity:
            self._note_activity()
        if self._rearming:
            self._rearming = self.store.rearm_for_campaign() > 0
        return MIN_PASS_INTERVAL if self._more_activity or self._rearming else pause

    def _note_activity(self) -> None:
        self._more_activity = store_activity(self.store) >= ACTIVITY_BATCH // 2

    def _claim_and_record(self, limit: int) -> float:
        share = max(1, limit // SHARDS)
        shards = self._shards(limit)
        claims = self.store.claim_silent(share, LEASE, shards)
        self._versions = claims.versions
        self._allowance.spend(len(claims.silences))
        self._record_and_confirm(claims)
        return (
            min(max(claims.seconds_to_next, MIN_PASS_INTERVAL), LONGEST_SLEEP)
            if len(shards) == SHARDS
            else MIN_PASS_INTERVAL
        )

    def _shards(self, limit: int) -> list[int]:
        """Return all shards, or the next ones in rotation where the limit is below their number."""
        first, count = self._turn, min(limit, SHARDS)
        self._turn = (first + count) % SHARDS
        return [(first + number) % SHARDS for number in range(count)]

    def _record_and_confirm(self, claims: ClaimedSilences) -> None:
        self.held = claims.silences
        if self.stop.is_set() or not self.held:
            return
        handed_in, locked = record_silences(self.held, claims.now_ms)
        self.store.confirm(handed_in)
        self._room -= len(handed_in)
        self.report.count(handed_in, claims.now_ms)
        self._locked += locked
        self.held = []

    def release_claims(self) -> None:
        """Return all held claims to the store. If that fails, the end of the lease returns them."""
        held, self.held = self.held, []
        self._release([*held, *self._locked])

    def _release_locked(self) -> None:
        """Return claims that a lock left out. Sooner, every pass would wait for the lock."""
        if self._locked and self._retrying.is_due():
            self._release(self._locked)

    def _release(self, claims: list[ClaimedSilence]) -> None:
        self._locked = []
        try:
            self.store.release(claims)
        except StoreUnavailable as error:
            log.warning("claims_not_released", count=len(claims), error=str(error))

    def _backlog_capacity(self) -> int:
        """Return how many more silences may be claimed. Reads the backlog at most once a second.

        Silences above the backlog limit stay in Redis instead of waiting as touches.
        """
        bound = settings.AFTERTOUCH_SILENCE_BACKLOG
        if self._room < bound and self.backlog_counts.is_due():
            was_full, self._room = self._room < 1, bound - count_undelivered(bound)
            if was_full != (self._room < 1):
                log.warning("backlog_over" if was_full else "backlog_full", bound=bound)
        return self._room

    def _push_policies(self) -> None:
        wanted = policies.read_policies()
        self._rearming = bool(wanted.campaigns)
        if self._versions != {wanted.version}:
            self.store.push(wanted)
            log.info("policies_pushed", version=wanted.version)

    def _send_report(self) -> None:
        stats.send_report(self.store, self.report, waits=self._room < 1)


def _run_step(step: Callable[[], object]) -> None:
    """Run a step of the housekeeping. The next housekeeping repeats one that failed."""
    try:
        step()
    except StoreUnavailable as error:
        log.warning("store_unavailable", error=str(error))
    except sql.UNAVAILABLE_ERRORS as error:
        log.warning("database_unavailable", error=str(error))
        close_old_connections()
    except Exception:
        log.exception("housekeeping_failed")
