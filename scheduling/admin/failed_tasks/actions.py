"""Define the actions on failed tasks with their texts, and the page that applies one to a single task."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from django import forms
from django.contrib import messages
from django.core.exceptions import PermissionDenied
from django.http import Http404, HttpRequest, HttpResponse
from django.shortcuts import redirect
from django.utils.functional import Promise
from django.utils.translation import gettext as _
from django.utils.translation import gettext_lazy
from unfold.widgets import UnfoldAdminDecimalFieldWidget, UnfoldAdminTextInputWidget

from scheduling.admin.base import actor_of
from scheduling.errors import AftertouchError
from scheduling.models import FailedTask
from scheduling.operations.bulk_actions import FASTEST, SLOWEST
from scheduling.operations.deeds import DEEDS, Deed


@dataclass(frozen=True, slots=True)
class Verb:
    """An action with its title and explanation."""

    title: str | Promise
    explains: str | Promise
    icon: str
    deed: Deed
    of_job: tuple[str | Promise, str | Promise] | None = None  #: title and explanation for RPA jobs

    def fits(self, row: FailedTask) -> bool:
        if row.state not in self.deed.states or (self.deed.unknown_only and row.failure != "unknown"):
            return False
        return not (self.deed.publishes and row.origin == FailedTask.Origin.MESSAGE)

    def about(self, *origins: str) -> Verb:
        """Return the texts for the origin: a touch is sent to a customer, a job has an effect."""
        if self.of_job is None or set(origins) != {FailedTask.Origin.RPA_JOB}:
            return self
        title, explains = self.of_job
        return replace(self, title=title, explains=explains)


VERBS: dict[str, Verb] = {
    "retry": Verb(
        gettext_lazy("Retry"),
        gettext_lazy(
            "It is published again with the same delivery key: a receiver that honours the key gets it at most once. "
            "The guards are asked again."
        ),
        "replay",
        DEEDS["retry"],
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
        DEEDS["again"],
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
        DEEDS["delivered"],
        of_job=(
            gettext_lazy("It had its effect"),
            gettext_lazy("You found out that the run did what it should. Nothing is run again."),
        ),
    ),
    "not_delivered": Verb(
        gettext_lazy("It was not delivered"),
        gettext_lazy("You found out that it did not arrive. The customer's slot is given back."),
        "unpublished",
        DEEDS["not_delivered"],
        of_job=(
            gettext_lazy("It had no effect"),
            gettext_lazy("You found out that the run changed nothing. Nothing is run again by this alone."),
        ),
    ),
    "ignore": Verb(
        gettext_lazy("Ignore"),
        gettext_lazy("Nothing is sent. It leaves the open ones and can still be retried later."),
        "visibility_off",
        DEEDS["ignore"],
        of_job=(
            gettext_lazy("Ignore"),
            gettext_lazy("Nothing is run. It leaves the open ones and can still be retried later."),
        ),
    ),
    "archive": Verb(
        gettext_lazy("Archive"),
        gettext_lazy("It is done with. It stays readable and can't be retried any more."),
        "archive",
        DEEDS["archive"],
    ),
}


class ReasonForm(forms.Form):
    reason = forms.CharField(
        label=gettext_lazy("Reason"),
        max_length=500,
        widget=UnfoldAdminTextInputWidget,
        help_text=gettext_lazy("Kept beside your name, for whoever looks at it later."),
    )


class PaceForm(ReasonForm):
    """Ask for a reason and a rate per second."""

    per_second = forms.FloatField(
        label=gettext_lazy("How many a second"), min_value=SLOWEST, max_value=FASTEST, initial=5,
        widget=UnfoldAdminDecimalFieldWidget, help_text=gettext_lazy("The receiver must be able to take them."),
    )  # fmt: skip

    @classmethod
    def of(cls, deed: Deed, given: Any) -> PaceForm:
        """Build the form with the action's default rate."""
        form = cls(given, initial={"per_second": deed.per_second})
        if not deed.publishes:
            form.fields["per_second"].help_text = ""
        return form


def act_page(tasks_admin: Any, request: HttpRequest, row: FailedTask, name: str) -> HttpResponse:
    """Confirm an action on one failed task and apply it."""
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
            verb.deed.act(row.pk, actor_of(request, form.cleaned_data["reason"]))
            messages.success(request, _("Done: %(what)s.") % {"what": verb.title})
        except AftertouchError:
            messages.error(
                request, _("Nothing was changed: somebody acted on it meanwhile, or its state does not allow it.")
            )
        return redirect(back)
    return tasks_admin.page(  # type: ignore[no-any-return]
        request, "ops/confirm.html", verb.title, form=form, text=verb.explains, button=verb.title, back=back,
        danger=verb.deed.as_new, original=row,
    )  # fmt: skip
