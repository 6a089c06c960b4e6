"""What a person does about failed tasks, one or many: each asks for a reason and says what became of it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from functools import partial
from typing import Any
from uuid import UUID

from django import forms
from django.contrib import messages
from django.contrib.admin.helpers import ACTION_CHECKBOX_NAME
from django.core.exceptions import PermissionDenied
from django.db.models import QuerySet
from django.http import Http404, HttpRequest, HttpResponse
from django.shortcuts import redirect
from django.utils.dateparse import parse_datetime
from django.utils.functional import Promise
from django.utils.timezone import now
from django.utils.translation import gettext as _
from django.utils.translation import gettext_lazy, ngettext
from unfold.widgets import UnfoldAdminTextInputWidget

from scheduling import failed_tasks
from scheduling.errors import AftertouchError
from scheduling.failed_tasks import Actor, Tally
from scheduling.models import FailedTask

MOST_AT_ONCE = 2_000  #: a request must end; the rest stays open for the next click
PER_SECOND = 20  #: the pace of many that are published again

Act = Callable[[UUID, Actor], Any]


@dataclass(frozen=True, slots=True)
class Verb:
    """One thing to do, in words for the person who does it."""

    title: str | Promise
    explains: str | Promise
    icon: str
    act: Act
    states: tuple[str, ...]
    unknown_only: bool = False
    publishes: bool = False
    as_new: bool = False  #: the customer may get something twice
    of_job: tuple[str | Promise, str | Promise] | None = None  #: title and words where it is about an RPA job

    def fits(self, row: FailedTask) -> bool:
        if row.state not in self.states or (self.unknown_only and row.failure != "unknown"):
            return False
        return not (self.publishes and row.origin == FailedTask.Origin.MESSAGE)

    def about(self, *origins: str) -> Verb:
        """In the words for what it is about: a touch is sent to a customer, a job has an effect."""
        if self.of_job is None or set(origins) != {FailedTask.Origin.RPA_JOB}:
            return self
        title, explains = self.of_job
        return replace(self, title=title, explains=explains)

    def act_on_all(self, failed_ids: Sequence[UUID], actor: Actor) -> Tally:
        if self.publishes:
            return failed_tasks.retry_all(failed_ids, actor, as_new=self.as_new, per_second=PER_SECOND)
        return failed_tasks.do_all(failed_ids, lambda failed_id, done: self.act(failed_id, actor))


OPEN, IGNORED = FailedTask.State.OPEN, FailedTask.State.IGNORED
VERBS: dict[str, Verb] = {
    "retry": Verb(
        gettext_lazy("Retry"),
        gettext_lazy(
            "It is published again with the same delivery key: a receiver that honours the key gets it at most once. "
            "The guards are asked again."
        ),
        "replay",
        failed_tasks.retry,
        (OPEN, IGNORED),
        publishes=True,
        of_job=(
            gettext_lazy("Retry"),
            gettext_lazy(
                "A new job with the same delivery key is published: a flow that honours the key has no second effect."
            ),
        ),
    ),
    "again": Verb(
        gettext_lazy("Send again as new"),
        gettext_lazy(
            "It gets a new delivery key, so no receiver can recognise it. If the first one did arrive, "
            "the customer gets it twice."
        ),
        "forward_to_inbox",
        partial(failed_tasks.retry, as_new=True),
        (OPEN, IGNORED),
        publishes=True,
        as_new=True,
        of_job=(
            gettext_lazy("Run again as new"),
            gettext_lazy(
                "The new job gets a delivery key of its own. If the first run had its effect, it happens twice."
            ),
        ),
    ),
    "delivered": Verb(
        gettext_lazy("It was delivered"),
        gettext_lazy("You found out that it arrived. It keeps its place in the customer's limits."),
        "task_alt",
        partial(failed_tasks.resolve, delivered=True),
        (OPEN,),
        unknown_only=True,
        of_job=(
            gettext_lazy("It had its effect"),
            gettext_lazy("You found out that the run did what it should. Nothing is run again."),
        ),
    ),
    "not_delivered": Verb(
        gettext_lazy("It was not delivered"),
        gettext_lazy("You found out that it did not arrive. The customer's slot is given back."),
        "unpublished",
        partial(failed_tasks.resolve, delivered=False),
        (OPEN,),
        unknown_only=True,
        of_job=(
            gettext_lazy("It had no effect"),
            gettext_lazy("You found out that the run changed nothing. Nothing is run again by this alone."),
        ),
    ),
    "ignore": Verb(
        gettext_lazy("Ignore"),
        gettext_lazy("Nothing is sent. It leaves the open ones and can still be retried later."),
        "visibility_off",
        failed_tasks.ignore,
        (OPEN,),
        of_job=(
            gettext_lazy("Ignore"),
            gettext_lazy("Nothing is run. It leaves the open ones and can still be retried later."),
        ),
    ),
    "archive": Verb(
        gettext_lazy("Archive"),
        gettext_lazy("It is done with. It stays readable and can't be retried any more."),
        "archive",
        failed_tasks.archive,
        (OPEN, IGNORED),
    ),
}


class ReasonForm(forms.Form):
    reason = forms.CharField(
        label=gettext_lazy("Reason"),
        max_length=500,
        widget=UnfoldAdminTextInputWidget,
        help_text=gettext_lazy("Kept beside your name, for whoever looks at it later."),
    )


def act_page(tasks_admin: Any, request: HttpRequest, row: FailedTask, name: str) -> HttpResponse:
    """One failed task."""
    if not tasks_admin.has_act_permission(request, row):
        raise PermissionDenied
    verb = VERBS.get(name)
    if verb is None:
        raise Http404
    verb = verb.about(row.origin)
    back = tasks_admin.url("change", row.pk)
    form = ReasonForm(request.POST or None)
    if request.method == "POST" and form.is_valid():
        try:
            verb.act(row.pk, actor_of(request, form))
            messages.success(request, _("Done: %(what)s.") % {"what": verb.title})
        except AftertouchError:
            messages.error(
                request, _("Nothing was changed: somebody acted on it meanwhile, or its state does not allow it.")
            )
        return redirect(back)
    return tasks_admin.page(  # type: ignore[no-any-return]
        request, "ops/confirm.html", verb.title, form=form, text=verb.explains, button=verb.title, back=back,
        danger=verb.as_new, original=row,
    )  # fmt: skip


def bulk(name: str) -> Callable[[Any, HttpRequest, QuerySet[FailedTask]], HttpResponse | None]:
    """The list's action: first a page that asks for a reason, then the deed. "All that match" means those that had
    failed when the page was shown."""
    verb = VERBS[name]

    def act(tasks_admin: Any, request: HttpRequest, queryset: QuerySet[FailedTask]) -> HttpResponse | None:
        if not tasks_admin.has_act_permission(request):
            raise PermissionDenied
        asked_at = parse_datetime(request.POST.get("asked_at", "")) or now()
        rows = queryset.filter(failed_at__lte=asked_at, state__in=verb.states)
        if verb.unknown_only:
            rows = rows.filter(failure="unknown")
        form = ReasonForm(request.POST if "confirmed" in request.POST else None)
        if form.is_valid():
            _act_on_all(request, verb, rows, form)
            return None
        return _ask(tasks_admin, request, name, rows, form, asked_at)

    act.__name__ = f"bulk_{name}"
    return act


def _ask(
    tasks_admin: Any, request: HttpRequest, name: str, rows: QuerySet[FailedTask], form: ReasonForm, asked_at: datetime
) -> HttpResponse:
    verb = VERBS[name].about(*rows.order_by().values_list("origin", flat=True).distinct())
    count = rows[: MOST_AT_ONCE + 1].count()
    hidden = [
        ("action", f"bulk_{name}"), ("confirmed", "1"), ("asked_at", asked_at.isoformat()),
        ("select_across", request.POST.get("select_across", "0")), ("index", "0"),
    ]  # fmt: skip
    hidden += [(ACTION_CHECKBOX_NAME, pk) for pk in request.POST.getlist(ACTION_CHECKBOX_NAME)]
    fits = ngettext("It applies to %(count)s failed task.", "It applies to %(count)s failed tasks.", count)
    problem = ""
    if count > MOST_AT_ONCE:
        problem = _("Only the first %(most)s are done now; the others stay open for the next click.") % {
            "most": MOST_AT_ONCE
        }
    return tasks_admin.page(  # type: ignore[no-any-return]
        request, "ops/confirm.html", verb.title, form=form, text=verb.explains, button=verb.title,
        facts=[fits % {"count": min(count, MOST_AT_ONCE)}], warning=problem, danger=verb.as_new, hidden=hidden,
        back=request.get_full_path(),
    )  # fmt: skip


def _act_on_all(request: HttpRequest, verb: Verb, rows: QuerySet[FailedTask], form: ReasonForm) -> None:
    failed_ids = list(rows.order_by("failed_at").values_list("pk", flat=True)[:MOST_AT_ONCE])
    tally = verb.act_on_all(failed_ids, actor_of(request, form))
    words = ngettext("%(what)s: %(count)s failed task.", "%(what)s: %(count)s failed tasks.", tally.done)
    messages.success(request, words % {"what": verb.title, "count": tally.done})
    if tally.conflicts:
        words = ngettext(
            "%(count)s was passed over: somebody acted on it meanwhile, or it can't be published again.",
            "%(count)s were passed over: somebody acted on them meanwhile, or they can't be published again.",
            tally.conflicts,
        )
        messages.warning(request, words % {"count": tally.conflicts})


def actor_of(request: HttpRequest, form: ReasonForm) -> Actor:
    return Actor(request.user.get_username(), request.user, form.cleaned_data["reason"])  # type: ignore[arg-type]
