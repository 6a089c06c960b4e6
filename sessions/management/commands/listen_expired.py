"""Run the listener for expired gateway keys: `manage.py listen_expired --pattern 'session:*'`."""

from __future__ import annotations

import signal
import threading
from datetime import timedelta
from typing import Any

from django.core.management.base import BaseCommand, CommandError, CommandParser

from scheduling import metrics
from scheduling.durations import parse_duration
from scheduling.monitoring.multiprocess import share_metrics
from sessions.detection.expired_keys import ExpiredKeyListener, KeyspaceEventsDisabled, Pattern, gateway_server
from sessions.detection.watcher import Watcher
from sessions.store.sessions import live_store


class Command(BaseCommand):
    help = (
        "Record silences from expired keys of a gateway, one key per user. Redis publishes expiries late, and only to "
        "connected listeners. Use frames where possible."
    )

    def add_arguments(self, parser: CommandParser) -> None:
        parser.add_argument("--pattern", type=Pattern, required=True, help="keys, for example session:*; * is the user")
        parser.add_argument("--tag", default="", help="tag of these sessions (default)")
        parser.add_argument(
            "--window", type=parse_duration, default=timedelta(seconds=30),
            help="merge expiries of one user within this time (30s)",
        )  # fmt: skip

    def handle(self, *args: Any, **options: Any) -> None:
        share_metrics()
        metrics.report_process("watcher")
        stop = threading.Event()
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda *_: stop.set())
        listener = ExpiredKeyListener(
            gateway_server(), live_store(), options["pattern"], tag=options["tag"], window=options["window"], stop=stop
        )
        try:
            listener.await_check()
        except KeyspaceEventsDisabled as error:
            raise CommandError(str(error)) from error
        listener.start()
        # This process also runs a watcher, so silences are recorded without another one.
        Watcher(live_store(), stop).run()
        listener.join()
        if listener.failure:
            raise CommandError(str(listener.failure))
