"""Silence policies on their way from the tables to the store, where the scripts read them."""

from __future__ import annotations

from typing import Any

import structlog
from django.db import Error, transaction
from django.db.models.signals import post_delete, post_save

from sessions.models import Campaign, SilencePolicy
from sessions.policy import PoliciesUnknown, PolicySet
from sessions.store.client import StoreAway
from sessions.store.sessions import live

log = structlog.get_logger(__name__)


def current() -> PolicySet:
    """Read the tables. Raises `PoliciesUnknown` while the database is away: the store then knows what it last held."""
    try:
        return read()
    except Error as error:
        log.warning("policies_not_read", error=str(error))
        raise PoliciesUnknown from error


def read() -> PolicySet:
    """What the tables say. Campaigns that are over still count: by the store's clock they may not be."""
    return PolicySet(
        tags={row.tag: row.spec() for row in SilencePolicy.objects.filter(retired_at=None)},
        campaigns=tuple(row.spec() for row in Campaign.objects.filter(retired_at=None, enabled=True)),
    )


def push() -> None:
    """Give the store what the tables say. Where it does not answer the watcher does so later."""
    try:
        live().push(read())
    except StoreAway as error:
        log.warning("policies_not_pushed", error=str(error))


def push_when_saved() -> None:
    for model in (SilencePolicy, Campaign):
        post_save.connect(_pushed_after_commit, sender=model, dispatch_uid=f"push {model.__name__}")
        post_delete.connect(_pushed_after_commit, sender=model, dispatch_uid=f"push {model.__name__} away")


def _pushed_after_commit(**_: Any) -> None:
    transaction.on_commit(push, robust=True)
