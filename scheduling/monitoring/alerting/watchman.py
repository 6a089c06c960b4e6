"""Looks again and again, in a thread of beat: neither a broker that is away nor a slow robot holds a tick up, and no
worker has to live for it. A database that hangs holds no look up: it is what has to be told."""

from __future__ import annotations

import threading
from datetime import UTC, datetime

import structlog
from django.conf import settings
from django.db import close_old_connections, connections

from scheduling.monitoring.alerting.notifier import Watch
from scheduling.monitoring.alerting.patience import Patience

log = structlog.get_logger(__name__)

LEAVE_WITHIN = 5.0  #: seconds; systemd gives beat twenty
PATIENCE = 30.0  #: seconds that a look waits for the database, for all answers together


class Watchman:
    def __init__(self) -> None:
        self._watch = Watch()
        self._patience = Patience(PATIENCE)
        self._leads = threading.Event()
        self._ended = threading.Event()
        self._thread: threading.Thread | None = None

    def stand(self, leads: bool) -> None:
        """Only the beat that leads watches. One that lost the database goes on until it knows that another leads."""
        if not leads:
            self._leads.clear()
            return
        self._leads.set()
        if self._thread is None or not self._thread.is_alive():
            self._thread = threading.Thread(target=self._look_again_and_again, name="watchman", daemon=True)
            self._thread.start()

    def end(self) -> None:
        """A message that is under way is not waited for to its end: it would be said again."""
        self._ended.set()
        self._leads.set()
        if self._thread is not None:
            self._thread.join(LEAVE_WITHIN)

    def _look_again_and_again(self) -> None:
        while not self._ended.is_set():
            if self._round():
                self._ended.wait(settings.AFTERTOUCH_ALERTS_EVERY.total_seconds())
            else:
                self._leads.wait()
        connections["default"].close()

    def _round(self) -> bool:
        """Whether there is another one by and by."""
        try:
            self._patience.begin(connections["default"])
            close_old_connections()
            if self._leads.is_set():
                self._watch.look(datetime.now(UTC))
                return True
            self._watch.hand_in()  # another leads since, and shall say that it is over
        except Exception:
            log.exception("alerts_not_watched")
            return True
        return False
