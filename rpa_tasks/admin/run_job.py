"""Run a task type for one shop or for many, now, and say for each what became of it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from django import forms
from django.core.exceptions import PermissionDenied
from django.db.models import QuerySet
from django.http import HttpRequest, HttpResponse
from django.shortcuts import redirect
from django.urls import reverse
from django.utils.translation import gettext as _
from django.utils.translation import gettext_lazy
from unfold.widgets import UnfoldAdminSelectWidget

from rpa_tasks.admin.run_again import OrderForm, may_edit_payload, source_of, told
from rpa_tasks.jobs.publish import Receipt, Refused, Request, publish
from rpa_tasks.models import Flow, Shop
from scheduling.errors import InvalidInput

MOST_AT_ONCE = 500  #: shops; a request must end
LISTED = 200


class RunForm(OrderForm):
    task_type = forms.ChoiceField(label=gettext_lazy("Task type"), widget=UnfoldAdminSelectWidget)
    field_order = ("task_type", "priority", "payload")

    def __init__(self, *args: Any, task_types: Iterable[str], **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.fields["task_type"].choices = [(each, each) for each in task_types]  # type: ignore[attr-defined]


@dataclass(slots=True)
class Outcome:
    """What became of the request, shop by shop."""

    published: list[tuple[Shop, Receipt]] = field(default_factory=list)
    merged: list[tuple[Shop, Receipt]] = field(default_factory=list)
    refused: list[tuple[Shop, str]] = field(default_factory=list)


def begin(shops: QuerySet[Shop]) -> HttpResponse:
    """From the board, with the chosen ones."""
    pks = ",".join(str(pk) for pk in shops.values_list("pk", flat=True)[: MOST_AT_ONCE + 1])
    return redirect(f"{reverse('admin:rpa_tasks_shop_run_now')}?shops={pks}")


def run_now_page(shops_admin: Any, request: HttpRequest) -> HttpResponse:
    if not shops_admin.has_run_permission(request):
        raise PermissionDenied
    shops = chosen(request)
    back = _back(shops_admin, shops)
    form = RunForm(request.POST or None, task_types=common_task_types(shops), edits_payload=may_edit_payload(request))
    if request.method == "POST" and form.is_valid():
        outcome = run(shops[:MOST_AT_ONCE], form.cleaned_data, source_of(request))
        return shops_admin.page(  # type: ignore[no-any-return]
            request, "rpa_tasks/run_outcome.html", _("Run now"), outcome=outcome, back=back, listed=LISTED,
            task_type=form.cleaned_data["task_type"], jobs_link=reverse("admin:rpa_tasks_job_changelist"),
        )  # fmt: skip
    problem, warning = _limits(shops, form)
    return shops_admin.page(  # type: ignore[no-any-return]
        request, "ops/confirm.html", _("Run now"), form=form, facts=[_named(shops)], problem=problem, warning=warning,
        text=_("One job a shop. Where one of its kind waits already, the request merges into it: the latest payload "
               "and the highest priority count."),
        button=_("Run now"), back=back,
    )  # fmt: skip


def chosen(request: HttpRequest) -> list[Shop]:
    """Living shops, by the address."""
    pks = [int(each) for each in request.GET.get("shops", "").split(",") if each.isdecimal()][: MOST_AT_ONCE + 1]
    living = Shop.objects.filter(pk__in=pks, retired_at=None, platform__retired_at=None)
    return list(living.select_related("platform"))


def common_task_types(shops: Iterable[Shop]) -> list[str]:
    """What can be run on every platform among them."""
    platforms = {shop.platform_id for shop in shops}
    known: dict[int, set[str]] = {pk: set() for pk in platforms}
    for pk, task_type in Flow.objects.filter(platform__in=platforms, retired_at=None).values_list(
        "platform_id", "task_type"
    ):
        known[pk].add(task_type)
    return sorted(set.intersection(*known.values())) if known else []


def run(shops: Iterable[Shop], wanted: dict[str, Any], source: str) -> Outcome:
    """Each in a transaction of its own: what one refuses does not undo the others."""
    outcome = Outcome()
    for shop in shops:
        request = Request(
            platform=shop.platform.key, shop_id=shop.shop_id, task_type=wanted["task_type"],
            payload=wanted.get("payload", {}), keeps_payload="payload" not in wanted, priority=wanted["priority"],
            source=source,
        )  # fmt: skip
        try:
            receipt = publish(request)
        except (InvalidInput, Refused) as error:
            outcome.refused.append((shop, " ".join(told(error))))
        else:
            (outcome.merged if receipt.duplicate else outcome.published).append((shop, receipt))
    return outcome


def _named(shops: list[Shop]) -> str:
    names = ", ".join(str(shop) for shop in shops[:8])
    more = len(shops) - 8
    return _("%(names)s and %(count)s more") % {"names": names, "count": more} if more > 0 else names


def _limits(shops: list[Shop], form: RunForm) -> tuple[str, str]:
    """Why it can't be done, and what one should know before."""
    if not shops:
        return _("No shop was chosen that is in use."), ""
    if not form.fields["task_type"].choices:  # type: ignore[attr-defined]
        return _("These shops have no task type in common: choose shops of one platform."), ""
    if len(shops) > MOST_AT_ONCE:
        return "", _("Only the first %(most)s are done at once.") % {"most": MOST_AT_ONCE}
    return "", ""


def _back(shops_admin: Any, shops: list[Shop]) -> str:
    return str(shops_admin.url("change", shops[0].pk) if len(shops) == 1 else shops_admin.url("changelist"))
