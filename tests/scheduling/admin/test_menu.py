"""The menu: few entries, one name for a page, counts of what waits, and nothing that the user may not open."""

from __future__ import annotations

import re
from collections.abc import Callable
from html import unescape
from typing import Any

import pytest
from django.contrib import admin
from django.test import Client
from django.urls import reverse
from pytest_django import Settings

from rpa_tasks.models import Platform, Shop
from scheduling.admin.navigation import MOST_COUNTED, Tab, list_menu_groups
from scheduling.models import FailedTask, Pause
from tests.support.tables import each_row
from tests.support.undrawn import read_context

pytestmark = pytest.mark.django_db

#: Lists that other pages link to.
NOT_IN_MENU = {"rpa_tasks_demowatermark"}


def tabs() -> list[Tab]:
    return [tab for _title, entries in list_menu_groups() for entry in entries for tab in entry.tabs]


def words(html: str) -> str:
    return " ".join(unescape(re.sub(r"<[^>]+>", " ", html)).split())


def sidebar(client: Client, path: str = "") -> str:
    page = client.get(path or reverse("admin:password_change")).content.decode()
    return page.partition('id="nav-sidebar-apps"')[2].partition('id="user-menu"')[0]


def test_menu_has_few_entries_and_every_list() -> None:
    assert sum(len(entries) for _title, entries in list_menu_groups()) <= 20
    names = [tab.name for tab in tabs()]
    assert len(names) == len(set(names))
    lists = {f"{model._meta.app_label}_{model._meta.model_name}" for model in admin.site._registry}
    assert {name for name in lists - NOT_IN_MENU if f"{name}_changelist" not in names} == set()


def test_menu_of_viewer_links_only_pages_that_open(as_member: Callable[[str], Client]) -> None:
    client = as_member("viewer")
    links = re.findall(r'href="([^"]+)"', sidebar(client))
    assert links
    for link in links:
        read_context(client, link)
    assert reverse("admin:auth_user_changelist") not in links


def test_menu_counts_open_failures_logins_and_pauses(
    as_member: Callable[[str], Client], failed: Callable[..., FailedTask], db: None
) -> None:
    client = as_member("viewer")
    assert "at-badge" not in sidebar(client)
    failed()
    FailedTask.objects.create(task_id=None, origin="touch", state="resolved_delivered", reason="x")
    Pause.objects.create(scope="all")
    shop = Shop.objects.create(platform=Platform.objects.get_or_create(key="pdd")[0], shop_id="s1")
    Shop.objects.filter(pk=shop.pk).update(login_state="needed")
    found = words(sidebar(client))
    assert "Failed tasks 1 open" in found
    assert "Pauses 1 paused" in found
    assert "Shops 1 Login needed" in found


def test_menu_count_is_capped_and_only_for_users_with_the_right(
    viewer: Client, client: Client, django_user_model: Any
) -> None:
    Pause.objects.bulk_create(Pause(scope=f"node:n{number}") for number in range(MOST_COUNTED + 5))
    assert f"Pauses {MOST_COUNTED}+ paused" in words(sidebar(viewer))
    user = django_user_model.objects.create_user("new", password="x", is_staff=True)
    client.force_login(user, backend="django.contrib.auth.backends.ModelBackend")
    assert "at-badge" not in sidebar(client)


def test_page_below_tab_shows_way_back(as_member: Callable[[str], Client], failed: Callable[..., FailedTask]) -> None:
    row = failed()
    page = as_member("viewer").get(reverse("admin:scheduling_touch_change", args=[row.task_id])).content.decode()
    heading = words(page.partition("<h1")[2].partition(">")[2].partition("</h1>")[0])
    assert heading == "broken → ann"
    assert (
        reverse("admin:scheduling_touch_changelist")
        in page.partition('aria-label="Breadcrumb"')[2].partition("</nav>")[0]
    )


@each_row("name, tone", [("Staging", "at-tag info"), ("Production <1>", "at-tag danger")])
def test_page_shows_name_of_installation(
    as_member: Callable[[str], Client], settings: Settings, name: str, tone: str
) -> None:
    settings.AFTERTOUCH_ENVIRONMENT = name
    page = as_member("viewer").get(reverse("admin:index")).content.decode()
    header = page.partition("<header>")[2].partition("</header>")[0]
    assert name in unescape(header)
    assert tone in header
    assert "<1>" not in header
