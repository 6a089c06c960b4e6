"""By what touches are looked for. Each way reads an index, or no further than it says: the table may hold millions."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any
from uuid import UUID

from django.db.models import QuerySet
from django.http import HttpRequest
from django.utils.translation import gettext_lazy as _
from unfold.contrib.filters.admin import DropdownFilter

from scheduling.admin.base import as_uuid
from scheduling.admin.labels import REASONS, reason
from scheduling.models import Attempt, Customer, Touch
from scheduling.operations import queries
from scheduling.operations.filters import standing

FOUND = 500  #: by an id that is not unique, or by words, at most
LOOKED_AT = 50_000  #: of the latest texts and touches


class ReasonFilter(DropdownFilter):  # type: ignore[misc]
    title = _("reason")
    parameter_name = "reason"

    def lookups(self, request: HttpRequest, model_admin: Any) -> list[tuple[str, Any]]:
        known = list(REASONS.items())
        chosen = request.GET.get("reason", "")
        return known if not chosen or chosen in REASONS else [*known, (chosen, reason(chosen))]

    def queryset(self, request: HttpRequest, queryset: QuerySet[Touch]) -> QuerySet[Touch]:
        return queryset.filter(reason=self.value()) if self.value() else queryset


class StandsFilter(DropdownFilter):  # type: ignore[misc]
    """States that somebody asks for together."""

    title = _("how it stands")
    parameter_name = "stands"

    def lookups(self, request: HttpRequest, model_admin: Any) -> list[tuple[str, Any]]:
        return [
            ("waiting", _("Waits for its time")), ("overdue", _("Overdue")), ("paused", _("Paused")),
            ("bad", _("Failed or unknown")),
        ]  # fmt: skip

    def queryset(self, request: HttpRequest, queryset: QuerySet[Touch]) -> QuerySet[Touch]:
        try:
            return queryset.filter(standing(self.value() or ""))
        except KeyError:
            return queryset


def in_order(asked: Mapping[str, str]) -> tuple[str, ...]:
    """Where an index has the rows in an order of its own: what waits by its time, what ended by its end. () for the
    usual order."""
    if asked.get("stands") in ("waiting", "overdue"):
        return ("due_at",)
    if asked.get("settled_at_from_0") or asked.get("settled_at_to_0"):
        return ("-settled_at",)
    return ()


def search(touches: QuerySet[Touch], term: str) -> QuerySet[Touch]:
    """Whole ids, or words of a text. What is found is looked up by its key, whatever else narrows the list."""
    if not term:
        return touches
    found = {task_id for way in (_of_customer, _of_event, _of_chat) for task_id in way(term)}
    if uuid := as_uuid(term):
        return touches.filter(task_id__in={*found, *queries.chain_of(uuid)})
    return touches.filter(task_id__in=found or set(_saying(term)))


def _of_customer(term: str) -> QuerySet[Any]:
    customer = Customer.objects.filter(user_id=term).values("pk")
    return _ids(Touch.objects.filter(customer__in=customer))


def _of_event(term: str) -> QuerySet[Any]:
    return _ids(Touch.objects.filter(event_id__in=queries.events_meant(term)))


def _of_chat(term: str) -> list[UUID]:
    """What was sent there, and what of the latest waits or was not sent."""
    sent = Touch.objects.filter(chat_id=term, reserved_at__isnull=False).exclude(chat_id="").order_by("-reserved_at")
    others = Touch.objects.filter(chat_id=term, reserved_at__isnull=True)
    if first := Touch.objects.order_by("-pk").values_list("pk", flat=True)[LOOKED_AT : LOOKED_AT + 1].first():
        others = others.filter(pk__gt=first)
    return [*sent.values_list("pk", flat=True)[:FOUND], *_ids(others)]


def _saying(term: str) -> QuerySet[Any]:
    """Words of a text, among the latest that were sent."""
    last = Attempt.objects.order_by("-pk").values_list("pk", flat=True).first() or 0
    said = Attempt.objects.filter(pk__gt=last - LOOKED_AT, body__icontains=term)
    return said.order_by("-pk").values_list("touch_id", flat=True)[:FOUND]


def _ids(touches: QuerySet[Touch]) -> QuerySet[Any]:
    return touches.order_by("-pk").values_list("pk", flat=True)[:FOUND]
