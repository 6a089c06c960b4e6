"""Find shops and jobs for the search of every page."""

from __future__ import annotations

from collections.abc import Iterator

from django.db.models import Q
from django.http import HttpRequest
from django.urls import reverse
from django.utils.translation import gettext_lazy as _

from rpa_tasks.models import Job, Shop
from scheduling.admin.base import parse_uuid
from scheduling.admin.global_search import MOST_READ, Finder, Found, fits_term
from scheduling.ids import reveal_odd_characters


def find_shops(request: HttpRequest, term: str) -> Iterator[Found]:
    for row in Shop.objects.filter(retired_at=None).select_related("platform")[:MOST_READ]:
        if fits_term(term, row.platform.key, row.shop_id, row.name, row.platform.name):
            link = reverse("admin:rpa_tasks_shop_change", args=[row.pk])
            yield Found(
                _("Shop"), "storefront", str(row), link, f"{row.platform} · {reveal_odd_characters(row.shop_id)}"
            )


def find_jobs(request: HttpRequest, term: str) -> Iterator[Found]:
    """Find jobs by their full id or that of their touch."""
    if uuid := parse_uuid(term):
        for row in Job.objects.filter(Q(pk=uuid) | Q(touch_key=uuid)).select_related("shop__platform", "flow"):
            link = reverse("admin:rpa_tasks_job_change", args=[row.pk])
            yield Found(_("Job"), "smart_toy", f"{row.shop} · {row.flow.task_type}", link, row.get_state_display())


SEARCHES: tuple[Finder, ...] = (("rpa_tasks.view_shop", find_shops), ("rpa_tasks.view_job", find_jobs))
