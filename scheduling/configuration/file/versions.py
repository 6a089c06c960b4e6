"""Name the stored configuration by a version, and publish a document on top of the version that a client has read."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

from django.db import transaction
from django.utils.crypto import salted_hmac

from scheduling import sql
from scheduling.configuration.file import apply
from scheduling.configuration.file.apply import ChangePlan
from scheduling.configuration.file.document import export_document
from scheduling.configuration.file.section import Stamp
from scheduling.errors import Conflict
from scheduling.models.encrypted import Unreadable

LOCK_WAIT = 10.0  #: seconds
_LOCK = "SELECT pg_advisory_xact_lock(hashtext('scheduling_configuration.document'))::text"


class OutdatedVersion(Conflict):
    """The configuration changed after this version was read."""


def compute_version() -> str:
    """Return the version of the stored configuration. The same content has the same version.

    It covers secrets. A key of this installation keeps readers of the version from guessing them.

    Raises:
        Conflict: a stored secret cannot be read here.
    """
    try:
        text = json.dumps(export_document(with_secrets=True), sort_keys=True)
    except Unreadable as error:
        raise Conflict(str(error)) from error
    return salted_hmac("scheduling.configuration.version", text, algorithm="sha256").hexdigest()[:32]


def check_version(expected: str | None) -> str:
    """Return the version of the stored configuration, if it is the one that a client expects; None accepts any.

    Raises:
        OutdatedVersion: they differ.
    """
    version = compute_version()
    if expected not in (None, version):
        raise OutdatedVersion
    return version


def publish_document(
    document: Mapping[str, Any],
    stamp: Stamp,
    expected: str | None,
    check: Callable[[ChangePlan], ChangePlan],
    *,
    may_repeat: bool = False,
) -> tuple[ChangePlan, str]:
    """Store a document in one transaction; return its changes and the new version.

    Publications run one after another, so that of two clients with one version the second is refused, whatever sections
    they give. The locks of the tables keep edits of the back office from coming between the comparison and the writes.
    `check` returns the plan, or raises what it has against it. With `may_repeat` a document that is stored already is
    accepted with any version: the client repeats its publication.

    Raises:
        OutdatedVersion: the stored version is not `expected`. Nothing was stored.
        InvalidConfiguration: with the problems of its first section that has any.
        OperationalError: another transaction held a lock for 10 s (see `sql.is_lock_timeout`).
    """
    with transaction.atomic():
        sql.limit_lock_waits(LOCK_WAIT)
        sql.rows(_LOCK, {})
        apply.lock_sections(document)
        if expected is not None and (not may_repeat or check(apply.plan_changes(document)).changes):
            check_version(expected)
        planned = apply.store_chosen(document, check, stamp)
        return planned, compute_version()
