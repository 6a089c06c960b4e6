"""Guide the first hour of an installation: a checklist on the overview until it is complete or the user hides it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from django.contrib.auth import get_user_model
from django.http import HttpRequest, HttpResponse
from django.shortcuts import redirect
from django.urls import reverse
from django.utils.functional import Promise
from django.utils.translation import gettext as _
from django.views.decorators.http import require_POST

from scheduling.models import ChannelConfig, DismissedChecklist, Event, Node
from scheduling.operations.sample_data import HARMLESS_KINDS


@dataclass(frozen=True, slots=True)
class Step:
    words: str | Promise
    link: str
    hint: str | Promise
    done: bool


def build_checklist(request: HttpRequest) -> list[Step]:
    """Return the steps that the user may take; empty if they are done or the user has hidden the list."""
    steps = list(_list_steps(request))
    if all(step.done for step in steps) or DismissedChecklist.objects.filter(user=request.user.pk).exists():
        return []
    return steps


def _list_steps(request: HttpRequest) -> Iterator[Step]:
    """Yield the steps. Each reads one row or stops at the second one."""
    user = request.user
    channels = ChannelConfig.objects.filter(retired_at=None).exclude(kind__in=HARMLESS_KINDS)
    if user.has_perm("scheduling.add_channelconfig"):
        yield Step(
            _("Set a channel"),
            reverse("admin:scheduling_channelconfig_add"),
            _("The channel of a new installation writes into the log only."),
            channels.exists(),
        )
    if user.has_perm("scheduling.change_node"):
        enabled = Node.objects.filter(enabled=True, retired_at=None, channel__in=channels)
        yield Step(
            _("Enable the first node"),
            reverse("admin:scheduling_node_matrix"),
            _("Select your channel at a node and enable it."),
            enabled.exists(),
        )
        yield Step(
            _("Send a test event"),
            reverse("api:openapi-view"),
            _("With an API key, or with manage.py sample_data load."),
            Event.objects.exists(),
        )
    if user.has_perm("auth.add_user"):
        staff = get_user_model()._default_manager.filter(is_staff=True, is_active=True)
        yield Step(
            _("Invite a colleague"),
            reverse("admin:auth_user_add"),
            _("Give staff status and a group, such as operator."),
            len(staff[:2]) > 1,
        )


@require_POST
def dismiss_checklist(request: HttpRequest) -> HttpResponse:
    """Hide the checklist from this user. Idempotent."""
    DismissedChecklist.objects.get_or_create(pk=request.user.pk)
    return redirect("admin:index")
