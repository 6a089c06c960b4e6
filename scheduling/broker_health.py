"""Detect a broker that accepts no messages, and fail publishing at once instead of waiting.

RabbitMQ short of memory or disk stops reading from publishers. It neither refuses nor confirms, so a publisher without
a time limit waits until the alarm is over. A message is only a wake-up: the rows are dispatched again later.

Each process keeps one blocked connection to hear the end of the alarm, and opens no new ones until then.
`config.celery.guards` installs `Connection` in kombu.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import structlog
from celery import current_app
from kombu.transport import pyamqp

log = structlog.get_logger(__name__)

CONFIRM_TIMEOUT = 5.0  #: seconds to wait for the confirmation of a silent broker
#: exchanges without a waiting consumer: their messages are dropped during an alarm
UNCONSUMED_EXCHANGES = ("celeryev", "reply.celery.pidbox")


@contextmanager
def connect_broker(seconds: float) -> Iterator[Any]:
    """Yield a connection of its own. Connecting, and each answer, may take `seconds`.

    A connection that was refused is tried again at once: kombu would wait for two seconds first.
    """
    with current_app.connection_for_write(connect_timeout=seconds) as connection:
        connection.transport_options = {**connection.transport_options, "socket_timeout": seconds}
        connection.ensure_connection(max_retries=1, interval_start=0, timeout=seconds)
        yield connection


class BrokerBlocked(ConnectionError):
    """The broker takes no messages now."""


class ConfirmingChannel(pyamqp.Channel):
    def basic_publish_confirm(self, *args: Any, **kwargs: Any) -> Any:
        connection = self.connection
        if connection is None:
            raise ConnectionError("the connection is closed")
        connection.publishing = True
        try:
            if connection.is_still_blocked() or broker_alarm.is_on():
                raise BrokerBlocked("the broker takes no messages")
            kwargs["timeout"] = kwargs.get("timeout") or CONFIRM_TIMEOUT
            kwargs["confirm_timeout"] = kwargs.get("confirm_timeout") or CONFIRM_TIMEOUT
            return super().basic_publish_confirm(*args, **kwargs)
        except BrokerBlocked:
            if kwargs.get("exchange") not in UNCONSUMED_EXCHANGES:
                raise
            return None
        except TimeoutError:
            connection.collect()  # a late confirmation would be taken for that of the next message
            raise ConnectionError(f"not confirmed within {CONFIRM_TIMEOUT:g} s") from None
        finally:
            connection.publishing = False

    def close(self, *args: Any, **kwargs: Any) -> Any:
        """Close the channel. On a blocked connection skip the handshake, because the broker does not read it."""
        if self.connection is not None and self.connection.blocked:
            return None
        return super().close(*args, **kwargs)


class Connection(pyamqp.Connection):
    Channel = ConfirmingChannel
    blocked = False
    publishing = False

    def is_still_blocked(self) -> bool:
        """Read pending frames and return whether the broker still blocks. The caller must own the connection."""
        try:
            while self.blocked and self._transport is not None:  # reading a closed connection would reconnect
                self.drain_events(timeout=0)
        except TimeoutError:
            return True
        except (OSError, *self.connection_errors):
            pass  # the connection has ended; the next one reports the alarm again
        if self.blocked:
            self._on_unblocked()
        return False

    def _on_blocked(self) -> None:
        self.blocked = True
        broker_alarm.log_change(blocked=True)
        if self.publishing:
            raise BrokerBlocked("the broker takes no messages")

    def _on_unblocked(self) -> None:
        self.blocked = False
        broker_alarm.log_change(blocked=False)

    def close(self, *args: Any, **kwargs: Any) -> Any:
        """Close the connection. Keep the first blocked one to hear the end of the alarm; discard others.

        The broker notices a closed connection only after the alarm.
        """
        if not self.blocked:
            return super().close(*args, **kwargs)
        if not broker_alarm.keep_connection(self):
            self.collect()
        return None


class BrokerAlarm:
    """The state of the broker alarm in this process. Holds one blocked connection that its owner has released."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._kept: Connection | None = None
        self._blocked = False

    def log_change(self, *, blocked: bool) -> None:
        if blocked != self._blocked:
            self._blocked = blocked
            log.warning("broker_blocked" if blocked else "broker_unblocked")

    def keep_connection(self, connection: Connection) -> bool:
        with self._lock:
            if self._kept is not None:
                return False
            self._kept = connection
            return True

    def is_on(self) -> bool:
        """Return whether an alarm is known to this process."""
        with self._lock:
            if self._kept is not None and not self._kept.is_still_blocked():
                self._kept.collect()
                self._kept = None
            return self._kept is not None

    def reset_after_fork(self) -> None:
        """Reset the state in a forked child.

        Keep a reference to the parent's connection: closing it would end it for both.
        """
        _inherited.append(self._kept)
        self.__init__()  # type: ignore[misc]


_inherited: list[Connection | None] = []
broker_alarm = BrokerAlarm()
os.register_at_fork(after_in_child=broker_alarm.reset_after_fork)


def accepts_messages(connection: Any) -> bool | None:
    """Return whether the broker accepts messages; None if this type of broker or account cannot be checked.

    The caller closes the kombu `connection` afterwards. RabbitMQ reports an alarm only during publishing, so two
    unroutable messages are published.
    """
    channel = connection.default_channel
    if hasattr(channel, "client"):
        memory = channel.client.info("memory")
        full = 0 < memory.get("maxmemory", 0) <= memory["used_memory"]
        return not (full and memory.get("maxmemory_policy") == "noeviction")
    if not isinstance(connection.connection, Connection):
        return None
    try:
        for _ in range(2):  # RabbitMQ may confirm the first message before it reports the alarm
            channel.basic_publish(channel.prepare_message(b""), exchange="", routing_key="aftertouch.unrouted")
    except BrokerBlocked:
        return False
    except connection.channel_errors:
        return None  # no permission to publish there
    return True
