"""Whether the broker takes messages.

RabbitMQ that is short of memory or disk reads no further from whoever publishes: nothing is refused, nothing is
confirmed, and a publisher without a bound waits until the alarm is over. Here it gives up at once, because a message is
a hint and the rows bring it back. What this process knows of the alarm is kept: nobody dials again while it lasts, and
what is published first after it goes out. `config.celery.guards` puts `Connection` into kombu.
"""

from __future__ import annotations

import os
import threading
from typing import Any

import structlog
from kombu.transport import pyamqp

log = structlog.get_logger(__name__)

CONFIRMED_WITHIN = 5.0  #: seconds for a broker that says nothing at all
ONLY_TOLD = ("celeryev", "reply.celery.pidbox")  #: exchanges of what nobody waits for: it is dropped meanwhile


class Blocked(ConnectionError):
    """The broker takes no messages now."""


class Channel(pyamqp.Channel):
    def basic_publish_confirm(self, *args: Any, **kwargs: Any) -> Any:
        connection = self.connection
        if connection is None:
            raise ConnectionError("the connection is closed")
        connection.publishing = True
        try:
            if connection.is_still_blocked() or alarm.is_on():
                raise Blocked("the broker takes no messages")
            kwargs["timeout"] = kwargs.get("timeout") or CONFIRMED_WITHIN
            kwargs["confirm_timeout"] = kwargs.get("confirm_timeout") or CONFIRMED_WITHIN
            return super().basic_publish_confirm(*args, **kwargs)
        except Blocked:
            if kwargs.get("exchange") not in ONLY_TOLD:
                raise
            return None
        except TimeoutError:
            connection.collect()  # a confirmation that comes late would be taken for the next one's
            raise ConnectionError(f"not confirmed within {CONFIRMED_WITHIN:g} s") from None
        finally:
            connection.publishing = False

    def close(self, *args: Any, **kwargs: Any) -> Any:
        """Who does not read never says goodbye."""
        if self.connection is not None and self.connection.blocked:
            return None
        return super().close(*args, **kwargs)


class Connection(pyamqp.Connection):
    Channel = Channel
    blocked = False
    publishing = False

    def is_still_blocked(self) -> bool:
        """Reads what has come meanwhile. Only for whoever has the connection to himself."""
        try:
            while self.blocked and self._transport is not None:  # what is closed would dial again to be read
                self.drain_events(timeout=0)
        except TimeoutError:
            return True
        except (OSError, *self.connection_errors):
            pass  # it has ended; the next one will tell
        if self.blocked:
            self._on_unblocked()
        return False

    def _on_blocked(self) -> None:
        self.blocked = True
        alarm.begins()
        if self.publishing:
            raise Blocked("the broker takes no messages")

    def _on_unblocked(self) -> None:
        self.blocked = False
        alarm.ends()

    def close(self, *args: Any, **kwargs: Any) -> Any:
        """A blocked one is kept, to hear when the alarm is over; the broker would not notice its end before that."""
        if not self.blocked:
            return super().close(*args, **kwargs)
        if not alarm.keeps(self):
            self.collect()
        return None


class Alarm:
    """What this process knows of it: one connection that its owner has given up is kept and listened to."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._kept: Connection | None = None
        self._told = False

    def begins(self) -> None:
        if not self._told:
            self._told = True
            log.warning("broker_blocked")

    def ends(self) -> None:
        if self._told:
            self._told = False
            log.warning("broker_unblocked")

    def keeps(self, connection: Connection) -> bool:
        with self._lock:
            if self._kept is not None:
                return False
            self._kept = connection
            return True

    def is_on(self) -> bool:
        """As far as this process knows."""
        with self._lock:
            if self._kept is not None and not self._kept.is_still_blocked():
                self._kept.collect()
                self._kept = None
            return self._kept is not None

    def forget(self) -> None:
        """In a child: the connection is its parent's. It is not let go of, because that would end it for both."""
        _inherited.append(self._kept)
        self.__init__()  # type: ignore[misc]


_inherited: list[Connection | None] = []
alarm = Alarm()
os.register_at_fork(after_in_child=alarm.forget)


def takes_messages(connection: Any) -> bool | None:
    """Asks the broker behind a connection of kombu's, which is closed afterwards: a publisher is only told while it
    publishes, so two messages go nowhere. None where this kind of broker cannot be asked."""
    channel = connection.default_channel
    if hasattr(channel, "client"):
        memory = channel.client.info("memory")
        full = 0 < memory.get("maxmemory", 0) <= memory["used_memory"]
        return not (full and memory.get("maxmemory_policy") == "noeviction")
    if not isinstance(connection.connection, Connection):
        return None
    try:
        for _ in range(2):  # the first may be confirmed before the alarm is told
            channel.basic_publish(channel.prepare_message(b""), exchange="", routing_key="aftertouch.nobody")
    except Blocked:
        return False
    except connection.channel_errors:
        return None  # it may not publish there
    return True
