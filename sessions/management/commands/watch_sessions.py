"""Run a watcher: `manage.py watch_sessions`."""

from __future__ import annotations

import signal
import threading
from typing import Any

from django.core.management.base import BaseCommand

from scheduling import metrics
from scheduling.monitoring.multiprocess import share_metrics
from sessions.detection.watcher import Watcher
from sessions.store.sessions import live_store


class Command(BaseCommand):
    help = "Record silent sessions as events. Any number of watchers may run. SIGTERM releases claims."

    def handle(self, *args: Any, **options: Any) -> None:
        share_metrics()
        metrics.report_process("watcher")
        stop = threading.Event()
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda *_: stop.set())
        Watcher(live_store(), stop).run()
