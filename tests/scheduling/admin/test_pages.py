"""Every page opens in both languages for users with the right."""

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
#: Texts of Unfold, celery-beat and simple-history that our catalogue translates.
ENGLISH = [
    "Filters", "Select action", "Type to search", "No results found", "This page yielded into no results",
    "Reset filters", "Apply Filters", "Search apps and models", "Go back", "Return to site", "Select value",
    "Changed by", "Change reason", "Welcome back", "Previous", "Add new item", ">General<", "Arguments", "Schedule<",
    "Light", "Dark", "Save and continue", "History", "Delete", "Periodic tasks", "Log out", "Change password",
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
@pytest.mark.parametrize("group", ["viewer", "admin"])
def test_pages_open_with_unreadable_secrets(as_member: Callable[[str], Client], group: str) -> None:
    from scheduling.configuration import snapshot
    from scheduling.models import AlertReceiver, ChannelConfig, Community

    AlertReceiver.objects.create(channel=ChannelConfig.objects.get(), community=Community.objects.get())
    with connection.cursor() as cursor:
        cursor.execute("UPDATE scheduling_channelconfig SET config = 'gibberish'")
        cursor.execute("UPDATE scheduling_community SET targets = 'gibberish'")
    snapshot._snapshot = None
    client = as_member(group)
    for page in every_page():
        assert client.get(page).status_code in (200, 302, 403), page


@pytest.mark.usefixtures("all_model_rows")
@pytest.mark.parametrize("group", ["viewer", "operator", "editor"])
def test_pages_open_or_refuse_for_each_group(as_member: Callable[[str], Client], group: str) -> None:
    client = as_member(group)
    for page in every_page():
        assert client.get(page).status_code in (200, 302, 403), page


@pytest.mark.usefixtures("all_model_rows")
def test_viewer_sees_all_and_saves_nothing(viewer: Client) -> None:
    for model in admin.site._registry:
        # An invitation gives rights; the audit log is for administrators.
        if model._meta.app_label != "scheduling" or model.__name__ in ("Invitation", "AuditEntry"):
            continue
        for page in pages(model):
            answer = viewer.get(page)
            if page.endswith("/add/"):
                assert answer.status_code == 403, page
                continue
            assert answer.status_code in (200, 302), page
            assert 'name="_save"' not in answer.content.decode(), page
            if page.endswith("/change/") and model.__name__ not in ("Touch", "FailedTask"):
                assert viewer.post(page, {}).status_code == 403, page


@pytest.mark.usefixtures("all_model_rows")
def test_every_page_opens_for_a_superuser_without_library_english(as_member: Callable[[str], Client]) -> None:
    """In Chinese. Other tests open the pages in English."""
    client = as_member("admin")
    client.cookies["django_language"] = "zh-hans"
    for page in every_page():
        answer = client.get(page)
        if answer.status_code != 200:
            # What the machinery writes can't be added by hand.
            assert answer.status_code == 302 or (page.endswith("/add/") and answer.status_code == 403), page
            continue
        visible = re.sub(r"<(script|style)\b.*?</\1>|<!--.*?-->", "", answer.content.decode(), flags=re.DOTALL)
        words = re.sub(r'\s(?!placeholder|title|aria-label)[\w:.@-]+="[^"]*"', "", visible)
        assert [word for word in ENGLISH if word in words] == [], page


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
