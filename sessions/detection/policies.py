"""Read silence policies from PostgreSQL and push them to the store, where the scripts use them."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from typing import Any

import structlog
from django.db import Error, transaction
from django.db.models.signals import post_delete, post_save
from django.utils.timezone import now

from scheduling.configuration.snapshot import current
from scheduling.policy.send_times import TimingSpec, compile_windows, open_spans
from sessions.models import Campaign, SilencePolicy
from sessions.policy import PolicySet
from sessions.store.client import StoreUnavailable
from sessions.store.sessions import live_store

OPEN_DAYS = 21  #: longer than the longest row of public holidays

log = structlog.get_logger(__name__)


def current_policies() -> PolicySet:
    """Return the policies for a store that lost them. Raises `StoreUnavailable` without the database."""
    try:
        return read_policies()
    except Error as error:
        log.warning("policies_not_read", error=str(error))
        raise StoreUnavailable("the silence policies are lost, and the database cannot be reached") from error


def read_policies() -> PolicySet:
    """Return the policies from the tables. Ended campaigns are included, because the store's clock decides when they
    end.
    """
    return PolicySet(
        policies={row.key: row.spec(_open_hours(row)) for row in SilencePolicy.objects.filter(retired_at=None)},
        campaigns=tuple(row.spec() for row in Campaign.objects.filter(retired_at=None, enabled=True)),
    )


def _open_hours(row: SilencePolicy) -> Sequence[tuple[datetime, datetime]]:
    """Return the opening hours of the next weeks, from the start of this day. They change once a day."""
    if not row.hours:
        return ()
    calendars = current().calendars
    timing = TimingSpec(calendars.default, windows=compile_windows(row.hours, calendars))
    return open_spans(timing, "", now(), OPEN_DAYS)


def push_policies() -> None:
    """Push the policies to the store. If the store does not answer, the watcher pushes them later."""
    try:
        live_store().push(read_policies())
    except StoreUnavailable as error:
        log.warning("policies_not_pushed", error=str(error))


def push_policies_on_save() -> None:
    for model in (SilencePolicy, Campaign):
        post_save.connect(_push_after_commit, sender=model, dispatch_uid=f"push {model.__name__}")
        post_delete.connect(_push_after_commit, sender=model, dispatch_uid=f"push deleted {model.__name__}")


def _push_after_commit(**_: Any) -> None:
    transaction.on_commit(push_policies, robust=True)
