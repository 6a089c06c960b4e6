"""Assignee and comments of a failed task."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from django import forms
from django.contrib import admin, messages
from django.contrib.auth.models import User
from django.db.models import QuerySet
from django.http import HttpRequest
from django.utils.html import Urlizer
from django.utils.safestring import SafeString, mark_safe
from django.utils.translation import gettext_lazy as _
from unfold.widgets import UnfoldAdminSelectWidget, UnfoldAdminTextareaWidget

from scheduling.admin.base import build_user_actor
from scheduling.admin.labels import translate_error
from scheduling.errors import InvalidInput
from scheduling.models import FailedTask
from scheduling.operations import failed_tasks
from scheduling.redaction import redact_text


class AssigneeFilter(admin.SimpleListFilter):
    title = _("assignee")
    parameter_name = "assignee"

    def lookups(self, request: HttpRequest, model_admin: Any) -> list[tuple[str, Any]]:
        return [("me", _("Assigned to me")), ("none", _("Not assigned"))]

    def queryset(self, request: HttpRequest, queryset: QuerySet[FailedTask]) -> QuerySet[FailedTask]:
        if self.value() == "me":
            return queryset.filter(assignee=request.user.pk)
        return queryset.filter(assignee=None) if self.value() == "none" else queryset


class AssignForm(forms.Form):
    user = forms.ChoiceField(label=_("Assignee"), required=False, widget=UnfoldAdminSelectWidget)

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        users = failed_tasks.list_assignable_users()
        self.fields["user"].choices = [  # type: ignore[attr-defined]
            ("", _("Not assigned")), *((each.username, format_user(each)) for each in users),
        ]  # fmt: skip


class CommentForm(forms.Form):
    text = forms.CharField(
        label=_("Comment"), max_length=failed_tasks.MAX_COMMENT, widget=UnfoldAdminTextareaWidget(attrs={"rows": 3})
    )


class CommentUrlizer(Urlizer):
    """Turn addresses into links that open in a new tab without a reference to this page."""

    url_template = '<a class="at-link" href="{href}" target="_blank" rel="noopener noreferrer nofollow">{url}</a>'


_urlizer = CommentUrlizer()


def format_user(user: User | None) -> str:
    """Return the full name of a user with the user name; "–" for None."""
    if user is None:
        return "–"
    name = user.get_full_name()
    return f"{name} ({user.username})" if name else user.username


def format_comment(text: str) -> SafeString:
    """Return a comment as HTML: masked, escaped, with links and line breaks."""
    linked = _urlizer(redact_text(text), autoescape=True)
    return mark_safe(str(linked).replace("\n", "<br>"))  # noqa: S308 (escaped by the urlizer)


def build_notes(request: HttpRequest, row: FailedTask, links: Mapping[str, str]) -> dict[str, Any]:
    """Return the template context of assignee and comments; the forms only for users who may act."""
    comments = [
        {"author": each.author_name, "at": each.commented_at, "html": format_comment(each.text)}
        for each in row.comments.all()
    ]
    context: dict[str, Any] = {"comments": comments, "assignee": format_user(row.assignee)}
    if "assign" in links:
        mine = row.assignee_id == request.user.pk
        context |= {
            "assign_form": AssignForm(initial={"user": row.assignee.username if row.assignee else ""}),
            "comment_form": CommentForm(),
            "assign_link": links["assign"],
            "comment_link": links["comment"],
            "me": "" if mine else request.user.get_username(),
        }
    return context


def assign_task(request: HttpRequest, row: FailedTask) -> None:
    """Assign the failed task to the chosen user, or to none."""
    try:
        failed_tasks.assign_failed_task(row.pk, request.POST.get("user") or None)
        messages.success(request, _("The assignee was changed."))
    except InvalidInput as error:
        messages.error(request, translate_error(error.errors[0].message))


def comment_task(request: HttpRequest, row: FailedTask) -> None:
    """Store the written comment."""
    form = CommentForm(request.POST)
    try:
        if form.is_valid():
            failed_tasks.add_comment(row.pk, form.cleaned_data["text"], build_user_actor(request))
            messages.success(request, _("The comment was added."))
        else:
            messages.error(request, " ".join(map(str, form.errors["text"])))
    except InvalidInput as error:
        messages.error(request, translate_error(error.errors[0].message))
