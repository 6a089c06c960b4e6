"""Every page of RPA opens for users with the right, and refuses others."""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest
from django.contrib import admin
from django.db.models import Model
from django.test import Client
from django.urls import reverse
from django.utils.timezone import now

from rpa_tasks.models import DemoOrder, DemoWatermark, ExecutionNode, Job, LoginState, Shop
from tests.rpa_tasks.admin.conftest import Market, url

pytestmark = pytest.mark.django_db

MODELS = [model for model in admin.site._registry if model._meta.app_label == "rpa_tasks"]


@pytest.fixture
def sample_rows(market: Market) -> Market:
    """A row of everything, in every state."""
    market.running("s1")
    market.waiting("s1", dedupe_key="a")
    market.failed("s2")
    Shop.objects.filter(pk=market.s2.pk).update(login_state=LoginState.NEEDED, login_lost_at=now())
    market.shop("s3", paused=True)
    market.shop("s4", retired_at=now())
    browser = {"slot": 0, "state": "busy", "shop": "pdd/s1", "port": 9222, "uses": 3, "started_at": now().isoformat(),
               "last_used_at": None, "rss_mb": 200, "reason": "", "profile": "pdd-s1"}  # fmt: skip
    ExecutionNode.objects.create(
        name="n1",
        seen_at=now(),
        started_at=now(),
        slots=5,
        queues=["high"],
        browsers=[browser, {"slot": 1, "state": "empty"}],
    )
    DemoOrder.objects.create(shop_id="s1", order_no="A1", version=1, status="paid", buyer="ann", amount="9.90")
    DemoWatermark.objects.create(shop_id="s1")
    return market


def pages(model: type[Model]) -> list[str]:
    name = model._meta.model_name
    found = [url(f"{name}_changelist"), url(f"{name}_add")]
    for row in model._default_manager.all():
        found += [url(f"{name}_change", row.pk), url(f"{name}_history", row.pk)]
    return found


def own_pages(market: Market) -> list[str]:
    job, shop = Job.objects.first(), market.s1
    assert job is not None
    return [
        url("shop_schedules"), url("shop_schedule_add"), f"{url('shop_run_now')}?shops={shop.pk}",
        url("job_cancel", job.pk), url("job_again", job.pk), f"{url('job_live')}?ids={job.pk},nonsense",
        f"{url('shop_live')}?ids={shop.pk},x", url("shop_confirm_login", shop.pk), url("shop_pause_row", shop.pk),
        url("shop_resume_row", shop.pk), url("platform_pause_row", market.pdd.pk),
        url("platform_close_breaker", market.pdd.pk),
        *(f"{url('shop_changelist')}?state={state}" for state in
          ("login", "resting", "paused", "full", "running", "waiting")),
        f"{url('job_changelist')}?platform={market.pdd.pk}&task_type=sync_order&reason=exit_65&state__exact=failed",
        f"{url('job_changelist')}?shop__id__exact={shop.pk}", f"{url('job_changelist')}?q=s1",
        f"{url('job_changelist')}?q={job.pk}",
    ]  # fmt: skip


def test_rpa_pages_open_for_superuser(as_member: Callable[[str], Client], sample_rows: Market) -> None:
    client = as_member("admin")
    every = [page for model in MODELS for page in pages(model)] + own_pages(sample_rows)
    statuses = {page: client.get(page).status_code for page in [*every, reverse("admin:index")]}
    closed = {page: status for page, status in statuses.items() if status not in (200, 302)}
    assert all(page.endswith("/add/") and status == 403 for page, status in closed.items()), closed


def test_rpa_pages_show_viewer_no_buttons(viewer: Client, sample_rows: Market) -> None:
    for model in MODELS:
        for page in pages(model):
            answer = viewer.get(page)
            if page.endswith("/add/"):
                assert answer.status_code == 403, page
                continue
            assert answer.status_code in (200, 302), page
            words = answer.content.decode()
            found = re.search(
                r'name="_save"|rpa_tasks/[^"]*(cancel|again|run-now|confirm-login|pause-row|close-breaker)', words
            )
            assert found is None, (page, found)
