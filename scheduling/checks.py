"""Check settings and constants against each other at each start."""

from __future__ import annotations

import re
from datetime import timedelta
from typing import Any

from celery import current_app
from django.conf import settings
from django.core.checks import CheckMessage, Error, Warning, register
from django.utils.module_loading import import_string

from scheduling.channels.base import Channel
from scheduling.delivery.outgoing import BATCH_DEADLINE, LEASE
from scheduling.ledger.touches import WAKEUP_LEASE
from scheduling.models.node import MAX_TIMEOUT

LOCAL_HOST = re.compile(r"|localhost|127\..*|::1|/.*")


@register
def check_lease_length(**_: Any) -> list[CheckMessage]:
    """Check that a lease without renewal outlasts a batch plus its longest last call."""
    if BATCH_DEADLINE + MAX_TIMEOUT + timedelta(seconds=3) <= LEASE:
        return []
    return [
        Error(
            f"The lease of a touch ({LEASE}) is shorter than a batch ({BATCH_DEADLINE}) and a call ({MAX_TIMEOUT}).",
            hint="Raise scheduling.delivery.outgoing.LEASE.",
            id="aftertouch.E001",
        )
    ]


@register
def check_visibility_timeout(**_: Any) -> list[CheckMessage]:
    """Check that Redis does not deliver a waiting wake-up message twice.

    It delivers an unacknowledged message again after `visibility_timeout`. Ours stay unacknowledged until their eta.
    """
    seconds: Any = settings.CELERY_BROKER_TRANSPORT_OPTIONS.get("visibility_timeout")
    needed = settings.AFTERTOUCH_HORIZON + WAKEUP_LEASE + BATCH_DEADLINE
    if seconds is None or timedelta(seconds=seconds) > 2 * needed:
        return []
    return [
        Error(
            f"visibility_timeout ({seconds} s) is too short for AFTERTOUCH_HORIZON ({settings.AFTERTOUCH_HORIZON}).",
            hint="Lower AFTERTOUCH_HORIZON.",
            id="aftertouch.E002",
        )
    ]


@register
def check_registry_paths(**_: Any) -> list[CheckMessage]:
    """Check that every dotted path in the registries can be imported, and that each channel is one."""
    registries = {
        "CHANNELS": settings.CHANNELS.values(),
        "CONFIG_SECTIONS": settings.CONFIG_SECTIONS,
        "INTEGRATIONS": settings.INTEGRATIONS,
    }
    found: list[CheckMessage] = []
    for name, paths in registries.items():
        for path in paths:
            try:
                named = import_string(path)
            except ImportError:
                found.append(Error(f"{name} names {path}, which cannot be imported.", id="aftertouch.E003"))
            else:
                if name == "CHANNELS" and not issubclass(named, Channel):
                    text = f"{name} names {path}, which does not derive from {Channel.__module__}.Channel."
                    found.append(Error(text, id="aftertouch.E003"))
    return found


@register(deploy=True)
def check_database_encryption(**_: Any) -> list[CheckMessage]:
    """Check that the address of a PostgreSQL server on another machine decides about TLS.

    By default libpq accepts a connection without TLS.
    """
    names = {"default": "DATABASE_URL", "replica": "DATABASE_REPLICA_URL"}
    return [
        Warning(
            f"{name} names another machine and no sslmode.",
            hint="Append ?sslmode=verify-full, or ?sslmode=disable inside a private network.",
            id="aftertouch.W005",
        )
        for alias, name in names.items()
        if (database := settings.DATABASES.get(alias))
        and not all(
            LOCAL_HOST.fullmatch(host)
            for host in f"{database['HOST']},{database['OPTIONS'].get('hostaddr', '')}".split(",")
        )
        and "sslmode" not in database["OPTIONS"]
    ]


@register(deploy=True)
def check_verification(**_: Any) -> list[CheckMessage]:
    """Warn of addresses of Redis or RabbitMQ that use TLS without the verification that is the default."""
    return [
        Warning(
            f"{name} uses TLS and does not verify the server.",
            hint="Name the certification authority by ssl_ca_certs. Remove ssl_cert_reqs and ssl_check_hostname.",
            id="aftertouch.W007",
        )
        for name in settings.UNVERIFIED_SERVERS
    ]


@register
def check_celery_app(**_: Any) -> list[CheckMessage]:
    """Check that Celery uses this application. Otherwise it publishes to amqp://localhost without an error."""
    if current_app.main == "aftertouch":
        return []
    return [Error("config.celery is not imported, so tasks would go to another broker.", id="aftertouch.E004")]
