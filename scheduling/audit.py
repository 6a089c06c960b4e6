"""Store who did what: one row of `AuditEntry` for each action, in the transaction of the action.

A rolled back action leaves no entry. PostgreSQL refuses changes of entries. An erasure alone may empty their texts.

Django's signals report edits with a history, actions of the back office, and logins. Actions of operators and API
clients on other rows call `record_action` where they happen.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from ipaddress import ip_address
from typing import Any

from django.contrib.admin.models import DELETION, LogEntry
from django.contrib.auth.models import User
from django.contrib.auth.signals import user_logged_in, user_logged_out, user_login_failed
from django.db.models import Model
from django.db.models.signals import post_save
from django.dispatch import receiver
from django.http import HttpRequest
from simple_history.models import HistoricalRecords
from simple_history.signals import post_create_historical_record

from scheduling.models import AuditEntry
from scheduling.redaction import redact, redact_text

LONGEST_VALUE = 300  #: characters of a value before or after
MOST_CHANGES = 50

Change = tuple[str, Any, Any]  #: field, value before, value after


def record_action(
    action: str, target: Model | tuple[str, object], *, actor: str, label: str = "", reason: str = "",
    changes: Sequence[Change] = (),
) -> None:  # fmt: skip
    """Store one entry. `target` is a row, or a kind with an id. Secrets and personal numbers are hidden."""
    _build_entry(action, target, actor=actor, label=label, reason=reason, changes=changes).save()


def record_actions(action: str, rows: Iterable[Model], *, actor: str, reason: str) -> None:
    """Store one entry for each row, labelled by its text, with few statements."""
    entries = [_build_entry(action, row, actor=actor, label=str(row), reason=reason) for row in rows]
    AuditEntry.objects.bulk_create(entries, batch_size=1000)


def _build_entry(
    action: str, target: Model | tuple[str, object], *, actor: str, label: str = "", reason: str = "",
    changes: Sequence[Change] = (),
) -> AuditEntry:  # fmt: skip
    kind, key = (target._meta.label_lower, target.pk) if isinstance(target, Model) else target
    request: HttpRequest | None = getattr(HistoricalRecords.context, "request", None)
    address = read_client_address(request)[:45] if request is not None else ""
    return AuditEntry(
        action=action, kind=kind, object_id=str(key)[:100], label=redact_text(label)[:200], actor=actor[:150],
        address=address, reason=redact_text(reason)[:500],
        changes=[[name, *(_redact_value(name, value) for value in values)] for name, *values in changes[:MOST_CHANGES]],
    )  # fmt: skip


def read_client_address(request: HttpRequest) -> str:
    """Return the client address as the web server reports it, or "" if that is none.

    The web server accepts `X-Forwarded-For` only from trusted proxies.
    """
    try:
        address = ip_address(request.META.get("REMOTE_ADDR", ""))
    except ValueError:
        return ""
    return str(getattr(address, "ipv4_mapped", None) or address)


def _redact_value(name: str, value: Any) -> str | None:
    if value is None:
        return None
    text = redact({name: value})[name]
    return (text if isinstance(text, str) else str(text))[:LONGEST_VALUE]


HISTORY_ACTIONS = {"+": "added", "~": "changed", "-": "deleted"}
LOG_ACTIONS = {1: "added", 2: "changed", 3: "deleted"}
#: Kinds whose titles and texts may name a customer.
SILENT_KINDS = frozenset((
    "scheduling.customer", "scheduling.touch", "scheduling.event", "scheduling.failedtask", "scheduling.complaint",
    "rpa_tasks.job",
))  # fmt: skip
#: Fields that change with every edit.
COUNTERS = frozenset({"version"})


@receiver(post_create_historical_record)
def _record_edit(history_instance: Any, instance: Any, **_: Any) -> None:
    """Record an edit that a history keeps, with each changed field."""
    user = history_instance.history_user
    record_action(
        HISTORY_ACTIONS[history_instance.history_type], instance, label=str(instance),
        actor=user.get_username() if user else "", reason=history_instance.history_change_reason or "",
        changes=_list_changes(history_instance) if history_instance.history_type == "~" else (),
    )  # fmt: skip


def _list_changes(record: Any) -> list[Change]:
    before = record.prev_record
    if before is None:
        return []
    delta = record.diff_against(before, foreign_keys_are_objs=False)
    return [(each.field, each.old, each.new) for each in delta.changes if each.field not in COUNTERS]


@receiver(post_save, sender=LogEntry)
def _record_admin_action(instance: LogEntry, created: bool, **_: Any) -> None:
    """Record what the back office logs, except edits that a history keeps."""
    kind = instance.content_type.model_class() if instance.content_type else None
    is_edit = instance.action_flag == DELETION or instance.change_message.startswith("[")
    if not created or (is_edit and hasattr(kind, "history")):
        return
    target = (kind._meta.label_lower if kind else "unknown", instance.object_id or "")
    is_silent = target[0] in SILENT_KINDS
    record_action(
        LOG_ACTIONS[instance.action_flag] if is_edit else "acted", target, actor=instance.user.get_username(),
        label="" if is_silent else instance.object_repr, reason="" if is_silent else instance.get_change_message(),
    )  # fmt: skip


@receiver(user_logged_in)
def _record_login(user: Any, **_: Any) -> None:
    record_action("logged_in", user, label=user.get_username(), actor=user.get_username())


@receiver(user_logged_out)
def _record_logout(user: Any, **_: Any) -> None:
    if user is not None:
        record_action("logged_out", user, label=user.get_username(), actor=user.get_username())


@receiver(user_login_failed)
def _record_failed_login(credentials: dict[str, Any], request: HttpRequest | None = None, **_: Any) -> None:
    """Record a wrong password of an existing user until the lockout refuses further tries.

    Other names are not stored: users type passwords there, and a client can invent names without end.
    """
    if request is None or getattr(request, "login_tries_left", 0) < 0:
        return
    user = User.objects.filter(username=credentials.get("username") or "").first()
    if user is not None:
        record_action("login_failed", user, label=user.username, actor="")
