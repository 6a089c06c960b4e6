"""Looks again and again, in a thread of beat: neither a broker that is away nor a slow robot holds a tick up, and no
worker has to live for it."""

from __future__ import annotations

import threading
from datetime import UTC, datetime

import structlog
from django.conf import settings
from django.db import close_old_connections

from scheduling.alerts.watch import Watch

log = structlog.get_logger(__name__)


class Watchman:
    def __init__(self) -> None:
        self._watch = Watch()
        self._leads = threading.Event()
        self._thread: threading.Thread | None = None

    def stand(self, leads: bool) -> None:
        """Only the beat that leads watches. One that lost the database goes on until it knows that another leads."""
        if not leads:
            self._leads.clear()
            return
        self._leads.set()
        if self._thread is None or not self._thread.is_alive():
            self._thread = threading.Thread(target=self._look_for_ever, name="watchman", daemon=True)
            self._thread.start()

    def _look_for_ever(self) -> None:
        resting = threading.Event()
        while True:
            try:
                close_old_connections()
                if self._leads.is_set():
                    self._watch.look(datetime.now(UTC))
                else:
                    self._watch.hand_in()  # another leads since, and shall say that it is over
                    self._leads.wait()
                    continue
            except Exception:
                log.exception("alerts_not_watched")
            resting.wait(settings.AFTERTOUCH_ALERTS_EVERY.total_seconds())
