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
        "For gateways that keep a key with a time to live for each user: when it expires the user is silent. "
        "Redis tells of it late, and not at all while nobody listens; send frames instead where you can."
    )

    def add_arguments(self, parser: CommandParser) -> None:
        parser.add_argument("--pattern", type=Pattern, required=True, help="like session:*, with * for the user")
        parser.add_argument("--tag", default="", help="of these sessions (default)")
        parser.add_argument(
            "--window", type=parse_duration, default=timedelta(seconds=30),
            help="a second expiry of the same user within this time is the same silence (30s)",
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
