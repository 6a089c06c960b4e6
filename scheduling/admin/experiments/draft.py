"""Pages of the user's open draft: its changes, and its text as YAML."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

from django import forms
from django.contrib import messages
from django.core.exceptions import PermissionDenied
from django.http import HttpRequest, HttpResponse
from django.shortcuts import redirect
from django.utils.translation import gettext as _
from django.utils.translation import gettext_lazy
from unfold.widgets import UnfoldAdminSelectWidget, UnfoldAdminTextareaWidget

from scheduling.admin.base import build_user_actor
from scheduling.admin.drafting import translate_conflict
from scheduling.admin.experiments.replay_result import build_changes_context
from scheduling.admin.labels import translate_error
from scheduling.configuration.file.apply import InvalidConfiguration
from scheduling.configuration.file.document import InvalidDocument
from scheduling.errors import Conflict
from scheduling.experiments.replay import open_drafts, runs
from scheduling.models import ConfigDraft, Replay
from scheduling.monitoring.duration_text import describe_duration

DAYS = (1, 3, 7, 14, 30)
KEEP = "_keep"  #: button that stores the text without a replay


class DaysForm(forms.Form):
    days = forms.TypedChoiceField(
        label=gettext_lazy("Events of the last"), coerce=int, initial=7, widget=UnfoldAdminSelectWidget,
        choices=lambda: [(each, describe_duration(timedelta(days=each))) for each in DAYS],
    )  # fmt: skip


class DraftForm(DaysForm):
    draft = forms.CharField(
        label=gettext_lazy("Draft"),
        strip=False,
        widget=UnfoldAdminTextareaWidget(attrs={"rows": 28, "spellcheck": "false", "wrap": "off"}),
        help_text=gettext_lazy(
            "Templates, stages, nodes, delay rules and limits in the format of a configuration file."
        ),
    )
    seen = forms.CharField(required=False, widget=forms.HiddenInput)

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        area = self.fields["draft"].widget
        area.attrs["class"] = f"{area.attrs.get('class', '')} at-mono"

    def clean_draft(self) -> str:
        """Validate the draft. Lists all errors, each with its place."""
        text: str = self.cleaned_data["draft"].replace("\r\n", "\n")
        try:
            runs.read_draft(text)
        except InvalidDocument as error:
            raise forms.ValidationError(translate_error(str(error))) from None
        except InvalidConfiguration as error:
            raise forms.ValidationError(_list_problem_lines(error.problems)) from None
        return text


def _list_problem_lines(problems: Any) -> list[str]:
    return [f"{each.path}: {translate_error(each.message)}" for each in problems]


def draft_page(replays_admin: Any, request: HttpRequest) -> HttpResponse:
    """Show the changes of the user's draft. A POST removes one, rebases, discards, or starts the replay."""
    if not replays_admin.has_add_permission(request):
        raise PermissionDenied
    form = DaysForm(request.POST if request.POST.get("act") == "replay" else None)
    if request.method == "POST":
        return redirect(_act_on_draft(replays_admin, request, form) or replays_admin.url("draft"))
    draft = open_drafts.find_draft(request.user)
    review = open_drafts.review_draft(draft) if draft else None
    return replays_admin.page(  # type: ignore[no-any-return]
        request, "ops/draft.html", _("My draft"), form=form, review=review,
        changes=build_changes_context(map(runs.serialize_change, review.changes)) if review else [],
        problems=_list_problem_lines(review.problems) if review else [],
        yaml_link=replays_admin.url("add"), back=replays_admin.url("changelist"),
    )  # fmt: skip


def _act_on_draft(replays_admin: Any, request: HttpRequest, form: DaysForm) -> str | None:
    """Apply the act of the page and show its problems. Return the address to show next; None for the page itself."""
    try:
        return _change_draft(replays_admin, request, form)
    except Conflict as error:
        messages.error(request, translate_conflict(error))
    except InvalidConfiguration as error:
        for line in _list_problem_lines(error.problems):
            messages.error(request, line)
    return None


def _change_draft(replays_admin: Any, request: HttpRequest, form: DaysForm) -> str | None:
    act, seen, user = request.POST.get("act"), request.POST.get("seen", ""), request.user
    position = request.POST.get("position", "")
    if act == "replay" and form.is_valid():
        run = open_drafts.replay_open_draft(user, form.cleaned_data["days"], seen, build_user_actor(request))
        return str(replays_admin.url("change", run.pk))
    if act == "rebase":
        open_drafts.rebase_draft(user, seen)
        messages.success(request, _("The draft now starts from the live configuration."))
    elif act == "drop" and position.isdecimal() and len(position) < 9:
        open_drafts.drop_change(user, int(position), seen)
        messages.success(request, _("The change was removed from the draft."))
    elif act == "discard":
        open_drafts.discard_open_draft(user)
        messages.success(request, _("The draft was discarded."))
    return None


def yaml_page(replays_admin: Any, request: HttpRequest) -> HttpResponse:
    """Edit the user's draft as text; without one, the live configuration; with `?from=`, a copy of a run's draft."""
    if not replays_admin.has_add_permission(request):
        raise PermissionDenied
    copied = _find_copied_run(request)
    draft = None if copied else open_drafts.find_draft(request.user)
    form = DraftForm(request.POST or None, initial=_get_initial_values(request, copied, draft))
    if request.method == "POST" and form.is_valid():
        try:
            return redirect(_store_text(replays_admin, request, form.cleaned_data, is_copy=copied is not None))
        except Conflict as error:
            form.add_error(None, translate_conflict(error))
    return replays_admin.page(  # type: ignore[no-any-return]
        request, "ops/replay_draft.html", _("My draft"), form=form, keep=None if copied else KEEP,
        changes_link=replays_admin.url("draft"), back=replays_admin.url("changelist"),
    )  # fmt: skip


def _find_copied_run(request: HttpRequest) -> Replay | None:
    earlier = request.GET.get("from", "")
    return Replay.objects.filter(pk=earlier).first() if earlier.isdecimal() and len(earlier) < 18 else None


def _get_initial_values(request: HttpRequest, copied: Replay | None, draft: ConfigDraft | None) -> dict[str, Any]:
    """Return initial values; none for a POST, because the export costs several reads."""
    if request.method == "POST":
        return {}
    if copied:
        return {"draft": copied.draft, "days": copied.days}
    text = draft.document if draft else runs.export_live_draft()
    return {"draft": text, "seen": open_drafts.compute_seen(draft)}


def _store_text(replays_admin: Any, request: HttpRequest, given: dict[str, Any], *, is_copy: bool) -> str:
    """Store the text as the draft unless it is a copy, and start its replay. Return the address to show next."""
    actor = build_user_actor(request)
    draft = None if is_copy else open_drafts.replace_text(request.user, given["draft"], given["seen"])
    if KEEP in request.POST:
        return str(replays_admin.url("draft"))
    if draft:
        seen = open_drafts.compute_seen(draft)
        run = open_drafts.replay_open_draft(request.user, given["days"], seen, actor)
    else:
        run = runs.create_replay(given["draft"], given["days"], actor)
    return str(replays_admin.url("change", run.pk))
