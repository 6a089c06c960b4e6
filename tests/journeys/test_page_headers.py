"""Every page works under the policy that it is sent with, in a real browser."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from django.contrib import admin
from django.urls import reverse
from pytest_django.live_server_helper import LiveServer

from tests.journeys.conftest import WAIT_LIMIT, record_csp_violations
from tests.support.chromium import OpenPage
from tests.support.matrix import MatrixBuilder, RecordEvent

pytestmark = [pytest.mark.browser, pytest.mark.django_db(transaction=True)]

OWN_PAGES = [
    "index", "scheduling_node_matrix", "scheduling_failedtask_groups", "scheduling_event_preview",
    "scheduling_pause_add", "scheduling_complaint_rates", "scheduling_node_changelist", "rpa_tasks_job_changelist",
]  # fmt: skip


@pytest.fixture
def sample_rows(matrix: MatrixBuilder, record_event: RecordEvent) -> None:
    """A row of what ops look at most."""
    from scheduling.models import DelayRule, Pause
    from tests.scheduling.core.conftest import deliver

    matrix.node("guide", rollout_percent=50, canary_template=matrix.template("new"))
    matrix.node("broken", trigger="order.paid", template=matrix.template("broken", body="{{ event.data.order_no }}"))
    deliver(record_event(chat_id="c1").task_ids)
    deliver(record_event("order.paid").task_ids)
    DelayRule.objects.create(pk=1, by_level={"vip": 3600})
    Pause.objects.create(scope="node:guide")


def pages() -> Iterator[str]:
    yield from (reverse(f"admin:{name}") for name in OWN_PAGES)
    for model in admin.site._registry:
        name = f"admin:{model._meta.app_label}_{model._meta.model_name}_"
        row = model._default_manager.first()
        yield reverse(f"{name}change", args=[row.pk]) if row else reverse(f"{name}add")


@pytest.mark.usefixtures("sample_rows")
def test_back_office_pages_follow_content_security_policy(ops: OpenPage, live_server: LiveServer) -> None:
    page = ops("en")
    for path in pages():
        page.goto(f"{live_server.url}{path}", wait_until="domcontentloaded")
    # Alpine lives, and so do menus that only it opens.
    page.goto(live_server.url + reverse("admin:scheduling_touch_changelist"))
    page.wait_for_function("() => window.Alpine && document.querySelector('[x-data]')._x_dataStack")


@pytest.mark.parametrize("path", ["/u/no-token", "/demo/chat/", "/api/v1/docs"])
def test_public_pages_follow_content_security_policy(chromium: Any, live_server: LiveServer, path: str) -> None:
    context, violations = chromium.new_context(), []
    context.set_default_timeout(WAIT_LIMIT)
    record_csp_violations(context, violations)
    page = context.new_page()
    answer = page.goto(f"{live_server.url}{path}", wait_until="networkidle")
    assert "script-src 'self';" in answer.headers["content-security-policy"]
    assert violations == []
    # Injected scripts do not run, and the violation is reported.
    page.evaluate(
        "document.body.append(Object.assign(document.createElement('script'), { textContent: 'window.ran = true' }))"
    )
    assert page.evaluate("window.ran") is None
    context.close()
    assert len(violations) == 1
