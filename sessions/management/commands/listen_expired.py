"""Run the listener for expired gateway keys: `manage.py listen_expired --pattern 'session:*'`."""

from __future__ import annotations

import signal
import threading
from argparse import ArgumentTypeError
from collections.abc import Callable
from datetime import timedelta
from typing import Any

from django.core.management.base import BaseCommand, CommandError, CommandParser

from scheduling import metrics
from scheduling.durations import parse_duration
from scheduling.monitoring.multiprocess import share_metrics
from sessions.detection.expired_keys import ExpiredKeyListener, KeyspaceEventsDisabled, Pattern, gateway_server
from sessions.detection.watcher import Watcher
from sessions.frames import TAG_LENGTH, is_tag
from sessions.store.sessions import live_store


def _explained(read: Callable[[str], object]) -> Callable[[str], object]:
    """Return `read` with its own error. Of a `ValueError`, argparse shows only the name of the function."""

    def read_option(text: str) -> object:
        try:
            return read(text)
        except ValueError as error:
            raise ArgumentTypeError(str(error)) from error

    return read_option


def _read_tag(text: str) -> str:
    if text and not is_tag(text):
        raise ValueError(f"must have at most {TAG_LENGTH} characters, and no control characters")
    return text


class Command(BaseCommand):
    help = (
        "Record silences from expired keys of a gateway, one key per user. Redis publishes expiries late, and only to "
        "connected listeners. Use frames where possible."
    )

    def add_arguments(self, parser: CommandParser) -> None:
        parser.add_argument(
            "--pattern", type=_explained(Pattern), required=True, help="keys, for example session:*; * is the user"
        )
        parser.add_argument("--tag", type=_explained(_read_tag), default="", help="tag of these sessions (default)")
        parser.add_argument(
            "--window", type=_explained(parse_duration), default=timedelta(seconds=30),
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
