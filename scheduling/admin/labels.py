"""Translate codes, validation errors and permissions into the texts that the back office shows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

from django.apps import apps
from django.contrib.auth.models import Permission
from django.db.models import ManyToManyField
from django.http import HttpRequest
from django.utils.functional import Promise
from django.utils.text import capfirst
from django.utils.translation import gettext as _
from django.utils.translation import gettext_lazy, gettext_noop

from scheduling.app_integrations import integrations
from scheduling.error_text import ErrorText
from scheduling.errors import InvalidInput

#: By code: why a touch waits or ended, and the rule of a verdict.
REASONS: dict[str, str | Promise] = {
    "expired": gettext_lazy("Expired before sending"),
    "node_disabled": gettext_lazy("Node switched off"),
    "paused": gettext_lazy("Paused"),
    "opted_out": gettext_lazy("Customer opted out"),
    "conversation": gettext_lazy("Customer is in a new conversation"),
    "answered": gettext_lazy("Customer has replied"),
    "presence_unknown": gettext_lazy("Chat state temporarily unknown"),
    "holdout": gettext_lazy("Control group"),
    "rollout": gettext_lazy("Community not yet in the rollout"),
    "quiet_hours": gettext_lazy("Quiet hours"),
    "condition": gettext_lazy("The node's condition does not hold"),
    "depth": gettext_lazy("Too many touches of the journey before"),
    "send_window": gettext_lazy("Outside the send windows"),
    "dedupe": gettext_lazy("Same content sent recently"),
    "community_dedupe": gettext_lazy("Same content sent to the community recently"),
    "cap": gettext_lazy("Customer's limit reached"),
    "community_cap": gettext_lazy("Community's limit reached"),
    "slot_hold": gettext_lazy("Cap slot reserved for a higher priority"),
    "template_data_missing": gettext_lazy("Data for the text is missing"),
    "no_target": gettext_lazy("No target to send to"),
    "target_disabled": gettext_lazy("Target is disabled"),
    "target_down": gettext_lazy("Receiver does not answer, waiting"),
    "target_busy": gettext_lazy("Receiver is busy, waiting"),
    "quota": gettext_lazy("Receiver's quota used up, waiting"),
    "channel_retired": gettext_lazy("Channel retired"),
    "channel_changed": gettext_lazy("Channel changed while the outcome was unknown"),
    "channel_misconfigured": gettext_lazy("Channel misconfigured"),
    "bad_target": gettext_lazy("Invalid target"),
    "internal_error": gettext_lazy("Internal error"),
    "secrets_unreadable": gettext_lazy(
        "Secrets cannot be decrypted on this server (encryption key missing). Waiting for another server."
    ),
    "timeout": gettext_lazy("No answer in time"),
    "connect": gettext_lazy("Could not connect"),
    "throttled": gettext_lazy("Receiver asks to slow down"),
    "garbled": gettext_lazy("Answer unreadable"),
    "worker_lost": gettext_lazy("Worker lost while sending"),
    "connect_timeout": gettext_lazy("Could not connect in time"),
    "proxy": gettext_lazy("The proxy does not pass the request on"),
    "disconnected": gettext_lazy("Connection broke off"),
    "redirect": gettext_lazy("Receiver redirects"),
    "gone": gettext_lazy("Receiver is gone"),
    "channel_error": gettext_lazy("Error in the channel's code"),
    "busy": gettext_lazy("Concurrency limit reached, waiting"),
    "dns": gettext_lazy("Host name not found"),
    "tls": gettext_lazy("Certificate not accepted"),
    "bad_url": gettext_lazy("Address cannot be read"),
    "private_address": gettext_lazy("Private network address, not allowed"),
    "scheme": gettext_lazy("Only https is allowed"),
    "http_other": gettext_lazy("Receiver answered something unexpected"),
    "vendor_other": gettext_lazy("Platform refused it for an unlisted reason"),
    "smtp_unsupported": gettext_lazy("Mail relay cannot take this mail"),
    "mark_failed": gettext_lazy("Could not be started, waiting"),
    "bad_content": gettext_lazy("Text does not fit the channel"),
    "token_expired": gettext_lazy("Platform refused the access token"),
    "token_refused": gettext_lazy("Platform gives no access token"),
    "token_failed": gettext_lazy("Access token could not be fetched"),
    "token_unavailable": gettext_lazy("No access token in time"),
}
#: Prefixes of codes that contain a name or a number.
PREFIXES = {
    "by:": gettext_noop("Cancelled by %s"),
    "event:": gettext_noop("Cancelled by event %s"),
    "restarted:": gettext_noop("Replaced by a newer event %s"),
    "http_": gettext_noop("Receiver answered HTTP %s"),
    "smtp_": gettext_noop("Mail relay answered %s"),
    "vendor_": gettext_noop("Platform refused it (code %s)"),
}


@cache
def list_reasons() -> Mapping[str, str | Promise]:
    """Return the labels of the codes of all apps."""
    return {**REASONS, **{code: label for app in integrations() for code, label in app.reasons.items()}}


def translate_reason(code: str) -> str:
    """Return the label of a code; an unknown code is returned unchanged."""
    reasons = list_reasons()
    if code in reasons:
        return str(reasons[code])
    head, plus, tail = code.rpartition("+")
    if plus and tail in reasons:
        second = translate_reason(tail)
        return _("%(first)s; %(second)s") % {"first": translate_reason(head), "second": second} if head else second
    prefixes = [*PREFIXES.items(), *(pair for app in integrations() for pair in app.reason_prefixes.items())]
    for prefix, words in prefixes:
        if code.startswith(prefix):
            return _(words) % code.removeprefix(prefix)
    return code


def describe_problem(code: str, detail: str) -> str:
    """Return the label of a code with its detail, of which either may be empty."""
    return " – ".join(part for part in (translate_reason(code), detail) if part)


def translate_error(text: str) -> str:
    """Return the text of an error in the reader's language; a text without translation unchanged."""
    if not isinstance(text, ErrorText):
        return text
    words = _(text.template)
    return words % {name: translate_error(value) for name, value in text.values.items()} if text.values else words


def translate_errors(error: Exception) -> list[str]:
    """Return the lines of an error that may have several."""
    problems = error.errors if isinstance(error, InvalidInput) else [error]
    return [translate_error(str(each)) for each in problems]


VERBS = {
    "add": gettext_lazy("may be added"), "change": gettext_lazy("may be changed"),
    "delete": gettext_lazy("may be deleted"), "view": gettext_lazy("may be looked at"),
}  # fmt: skip


def describe_permission(permission: Permission) -> str:
    """Format a permission: `Outreach · channel · may be changed`."""
    kind = permission.content_type
    model = kind.model_class()
    if model is None:
        return str(permission)
    name = _(str(model._meta.verbose_name))
    if what := getattr(model, "instance_type", None):
        name = _("history of: %(what)s") % {"what": what._meta.verbose_name}
    verb, _under, rest = permission.codename.partition("_")
    own = dict(model._meta.permissions).get(permission.codename)
    label = own or (VERBS.get(verb) if rest == kind.model else None) or permission.name
    return f"{apps.get_app_config(kind.app_label).verbose_name} · {name} · {_(str(label))}"


class TranslatedPermissions:
    """Show permissions with translated names in the admins of users and groups."""

    def formfield_for_manytomany(self, db_field: ManyToManyField[Any, Any], request: HttpRequest, **named: Any) -> Any:
        field: Any = super().formfield_for_manytomany(db_field, request, **named)  # type: ignore[misc]
        if db_field.related_model is Permission:
            field.label_from_instance = describe_permission
        return field

    def get_deleted_objects(self, objs: Any, request: HttpRequest) -> tuple[list[Any], dict[str, int], set[Any], Any]:
        """Omit the rows that link a group to its permissions: there may be a hundred, without names."""
        deleted, counts, needed, protected = super().get_deleted_objects(objs, request)  # type: ignore[misc]
        links = [field.remote_field.through._meta for field in self.model._meta.many_to_many]  # type: ignore[attr-defined]
        beginnings = tuple(f"{capfirst(link.verbose_name)}: " for link in links)
        for link in links:
            counts.pop(link.verbose_name_plural, None)
        return _drop_prefixed(beginnings, deleted), counts, needed, protected


def _drop_prefixed(beginnings: tuple[str, ...], nested: Sequence[Any]) -> list[Any]:
    kept = [_drop_prefixed(beginnings, each) if isinstance(each, list) else each for each in nested]
    return [each for each in kept if each != [] and not (isinstance(each, str) and each.startswith(beginnings))]
