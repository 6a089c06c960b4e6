"""Guards against errors that end a Celery 5.7 / kombu 5.7 worker or make it lose a message silently.

Each guard has a test against the real library. The test without the guard fails once upstream fixes the error.
"""

from __future__ import annotations

from json import JSONDecodeError
from typing import Any

import structlog
from celery.app import base as celery_app
from celery.contrib.django.task import DjangoTask
from celery.worker.consumer import delayed_delivery
from celery.worker.consumer.consumer import Consumer
from django.db import close_old_connections
from kombu.transport import pyamqp
from kombu.transport import redis as redis_transport
from kombu.transport.redis import QoS, Transport

from config.celery.schedule import PASSES
from scheduling import broker_health

log = structlog.get_logger(__name__)

_establish = pyamqp.Transport.establish_connection

TICK_HEADER = "periodic_task_name"  #: header in which django-celery-beat names the row of a message


class SafeTask(DjangoTask):
    """A task that cannot end its worker and whose failure becomes a failed task."""

    abstract = True

    @classmethod
    def on_bound(cls, app: Any) -> None:
        cls.send_events = cls.name not in PASSES

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        close_old_connections()
        try:
            return super().__call__(*args, **kwargs)
        except MemoryError as error:
            # Celery re-raises MemoryError in the main process, which ends the worker with all its children.
            raise RuntimeError(f"out of memory: {error}") from None

    def on_failure(self, exc: Any, task_id: Any, args: Any, kwargs: Any, einfo: Any) -> None:
        """Create a failed task, except for work that is repeated without a person: ticks, and tasks with database
        retries.
        """
        super().on_failure(exc, task_id, args, kwargs, einfo)
        if not getattr(self, "is_tick", False) and not isinstance(exc, getattr(self, "autoretry_for", ())):
            _record_failed_message(
                "task_error", {"task": self.name, "args": args, "kwargs": kwargs}, f"{type(exc).__name__}: {exc}"
            )


class DeadLetterConsumer(Consumer):
    """Create a failed task for messages that Celery would discard: unknown tasks and unreadable messages."""

    def create_task_handler(self, *args: Any, **kwargs: Any) -> Any:
        """Handle a JSON body that is not a task (not three parts, no id). Celery does not catch its errors."""
        receive = super().create_task_handler(*args, **kwargs)

        def receive_or_dead_letter(message: Any) -> Any:
            try:
                return receive(message)
            except (ValueError, TypeError, KeyError) as error:
                return self.on_invalid_task(None, message, error)

        return receive_or_dead_letter

    def on_unknown_message(self, body: Any, message: Any) -> None:
        _record_failed_message("unknown_format", message.body, queue=_queue_of_message(message))
        super().on_unknown_message(body, message)

    def on_unknown_task(self, body: Any, message: Any, exc: Any) -> None:
        """Drop unknown ticks, because they are published again.

        An unknown tick belongs to another version during an upgrade or downgrade. Otherwise it would create a failed
        task every few seconds.
        """
        if (message.headers or {}).get(TICK_HEADER):
            log.info("tick_unknown", task=str(exc), queue=_queue_of_message(message))
            message.reject_log_error(log, self.connection_errors)
            return
        _record_failed_message(
            "unknown_task", {"headers": message.headers, "body": message.body}, str(exc), _queue_of_message(message)
        )
        super().on_unknown_task(body, message, exc)

    def on_invalid_task(self, body: Any, message: Any, exc: Any) -> None:
        _record_failed_message(
            "invalid_task", {"headers": message.headers, "body": message.body}, str(exc), _queue_of_message(message)
        )
        super().on_invalid_task(body, message, exc)

    def on_decode_error(self, message: Any, exc: Any) -> None:
        _record_failed_message("undecodable", message.body, str(exc), _queue_of_message(message))
        super().on_decode_error(message, exc)


class UnreadableMessage:
    """A list item of a queue that is not a message."""

    def __init__(self, raw: Any) -> None:
        self.raw = raw


def install_guards() -> None:
    """Patch kombu where it has no hook for a guard. Idempotent."""
    if getattr(QoS, "aftertouch", False):
        return
    restore_unacked_once = QoS.restore_unacked_once
    loads, deliver = redis_transport.loads, Transport._deliver

    def restore_while_connected(self: Any, stderr: Any = None) -> Any:
        """Skip the restore without a connection.

        kombu 5.7 closes the transport before it restores, and the resulting AttributeError ends the worker. The
        leases of the rows return unacknowledged work.
        """
        connection = getattr(self.channel, "connection", None)
        if connection is None or getattr(connection, "client", None) is None:
            self._on_collect.cancel()
            return None
        return restore_unacked_once(self, stderr)

    def loads_or_unreadable(raw: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            return loads(raw, *args, **kwargs)
        except (JSONDecodeError, UnicodeDecodeError):
            return UnreadableMessage(raw)

    def deliver_readable(self: Any, message: Any, queue: str) -> Any:
        """Dead-letter a raw list item, which would end the worker when kombu decodes it."""
        if isinstance(message, UnreadableMessage) or not _is_envelope(message):
            _record_failed_message("unreadable", getattr(message, "raw", message), queue=queue)
            return None
        return deliver(self, message, queue)

    # Celery moves delays on quorum queues to its own exchanges, with a resolution of whole seconds. Delays here are
    # milliseconds, so the worker holds them, as for any other queue. Celery counts such messages differently still.
    for module in (celery_app, delayed_delivery):
        module.detect_quorum_queues = lambda app, driver_type: (False, "")
    pyamqp.Transport.establish_connection = _establish_to_named_host
    pyamqp.Transport.Connection = broker_health.Connection
    QoS.restore_unacked_once = restore_while_connected
    redis_transport.loads = loads_or_unreadable
    Transport._deliver = deliver_readable
    QoS.aftertouch = True


def _establish_to_named_host(transport: Any) -> Any:
    """Connect, and verify the certificate by the host of this attempt.

    kombu writes the name of the first host into options that all connections share, and replaces localhost.
    """
    client, host = transport.client, transport.client.hostname or "localhost"
    if client.ssl and "server_hostname" in client.ssl:
        client.ssl = {**client.ssl, "server_hostname": host}
    try:
        return _establish(transport)
    finally:
        client.hostname = host


def _is_envelope(message: Any) -> bool:
    return (
        isinstance(message, dict)
        and "body" in message
        and isinstance(message.get("properties"), dict)
        and "delivery_tag" in message["properties"]
        and isinstance(message["properties"].get("delivery_info"), dict)
    )


def _queue_of_message(message: Any) -> str:
    return str((message.delivery_info or {}).get("routing_key", ""))


def _record_failed_message(reason: str, body: Any, detail: str = "", queue: str = "") -> None:
    """Create a failed task in the worker's main process, then close the connection, which children would inherit."""
    from django.db import connection

    from scheduling.ledger.failures import record_unreadable_message

    log.error("message_dead_lettered", reason=reason, detail=detail, queue=queue)
    try:
        close_old_connections()
        record_unreadable_message(reason, body, detail=detail, queue=queue)
    except Exception:
        log.exception("message_not_dead_lettered", reason=reason, body=repr(body)[:20_000])
    finally:
        if not connection.in_atomic_block:
            connection.close()
