"""Every page opens, whatever its rows hold; tests/security has the rights and tests/language the words."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
from django.contrib import admin
from django.db import connection
from django.db.models import Model
from django.test import Client
from django.urls import reverse

from tests.support.matrix import MatrixBuilder, RecordEvent

pytestmark = pytest.mark.django_db(transaction=True)

OWN_PAGES = [
    "scheduling_node_matrix", "scheduling_failedtask_groups", "scheduling_event_preview", "scheduling_pause_add",
    "scheduling_complaint_rates",
]  # fmt: skip


@pytest.fixture
def all_model_rows(matrix: MatrixBuilder, record_event: RecordEvent, failed: Callable[..., Any]) -> None:
    """A row of everything that ops look at."""
    from scheduling.models import Community, DelayRule, Pause
    from tests.scheduling.core.conftest import deliver

    matrix.node("guide", rollout_percent=50, rollout_communities=["c1"], canary_template=matrix.template("new"))
    deliver(record_event(chat_id="c1").task_ids)
    failed()
    DelayRule.objects.create(pk=1, by_level={"vip": 3600})
    Community.objects.create(
        chat_id="c1", targets={"wecom": {"url": "https://qyapi.weixin.qq.com/cgi-bin/webhook/send?key=1"}}
    )
    Pause.objects.create(scope="node:guide")


def pages(model: type[Model]) -> list[str]:
    names = f"admin:{model._meta.app_label}_{model._meta.model_name}_"
    found = [reverse(f"{names}changelist"), reverse(f"{names}add")]
    row = model._default_manager.first()
    return found + (
        [reverse(f"{names}change", args=[row.pk]), reverse(f"{names}history", args=[row.pk])] if row else []
    )


def every_page() -> list[str]:
    models = [page for model in admin.site._registry for page in pages(model)]
    return [reverse("admin:index"), *(reverse(f"admin:{name}") for name in OWN_PAGES), *models]


@pytest.mark.usefixtures("all_model_rows")
def test_every_page_opens_for_a_superuser_with_unreadable_secrets(as_member: Callable[[str], Client]) -> None:
    from scheduling.configuration import snapshot
    from scheduling.models import AlertReceiver, ChannelConfig, Community

    AlertReceiver.objects.create(channel=ChannelConfig.objects.get(), community=Community.objects.get())
    with connection.cursor() as cursor:
        cursor.execute("UPDATE scheduling_channelconfig SET config = 'gibberish'")
        cursor.execute("UPDATE scheduling_community SET targets = 'gibberish'")
    snapshot._snapshot = None
    client = as_member("admin")
    statuses = {page: client.get(page).status_code for page in every_page()}
    # What the machinery writes can't be added by hand.
    expected = {page: (200, 302, 403) if page.endswith("/add/") else (200, 302) for page in statuses}
    assert {page: status for page, status in statuses.items() if status not in expected[page]} == {}


def test_login_redirects_to_the_overview(client: Client, as_member: Callable[[str], Client]) -> None:
    as_member("viewer")
    answer = client.post(reverse("admin:login"), {"username": "viewer", "password": "x"})
    assert answer.status_code == 302
    assert answer["location"] == reverse("admin:index")


def test_overview_loads_no_external_resource(as_member: Callable[[str], Client]) -> None:
    page = as_member("viewer").get(reverse("admin:index")).content.decode()
    assert not re.search(r'(src|href)="(https?:)?//', page)


def test_language_can_be_switched(viewer: Client) -> None:
    viewer.post("/i18n/setlang/", {"language": "zh-hans"})
    assert "总览" in viewer.get(reverse("admin:index")).content.decode()
