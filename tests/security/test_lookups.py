"""A list is narrowed by its own filters only: what the pages hide cannot be asked for digit by digit."""

from __future__ import annotations

import html
import re
from collections.abc import Callable
from typing import Any

import pytest
from django.contrib import admin
from django.test import Client
from django.urls import reverse

from scheduling.operations import commands
from tests.language.page_texts import every_page
from tests.security import admin_pages

pytestmark = pytest.mark.django_db


def address(model: Any) -> str:
    return reverse(f"admin:{model._meta.app_label}_{model._meta.model_name}_changelist")


@pytest.mark.parametrize("lookup", ["addresses__phone__startswith", "addresses__contains", "name__startswith"])
def test_customer_list_lookup_of_partial_value_is_refused(viewer: Client, lookup: str) -> None:
    commands.update_customer("ann", {"addresses": {"phone": "13812345678"}, "name": "Ann"})
    url = reverse("admin:scheduling_customer_changelist")
    assert viewer.get(url, {lookup: "138"}).status_code == 400


@pytest.mark.parametrize(
    ("name", "lookup"),
    [
        ("scheduling_touch", "customer__addresses__phone__startswith"),
        ("scheduling_touch", "node__channel__config__contains"),
        ("scheduling_touch", "state__startswith"),
        ("scheduling_event", "data__phone__startswith"),
        ("scheduling_failedtask", "payload__user_id__startswith"),
        ("scheduling_failedtask", "pk__in"),
        ("rpa_tasks_job", "payload__password__startswith"),
        ("rpa_tasks_job", "shop__name__startswith"),
        ("scheduling_complaint", "customer_id"),
    ],
)
def test_list_lookup_without_filter_is_refused(viewer: Client, name: str, lookup: str) -> None:
    assert viewer.get(reverse(f"admin:{name}_changelist"), {lookup: "1"}).status_code == 400


def test_list_lookup_by_startswith_is_refused_for_all_columns(as_member: Callable[[str], Client], matrix: Any) -> None:
    client = as_member("admin")
    taken = []
    for model in admin.site._registry:
        for field in model._meta.get_fields():
            if client.get(address(model), {f"{field.name}__startswith": "1"}).status_code != 400:
                taken.append((model.__name__, field.name))
    assert taken == []


def test_product_links_to_lists_are_accepted(
    as_member: Callable[[str], Client], matrix: Any, record_event: Callable[..., Any]
) -> None:
    """Each link with a filter, on every page, and each choice of each filter."""
    client = as_member("admin")
    admin_pages.build(matrix, record_event)
    lists = {address(model) for model in admin.site._registry}
    links = set()
    for page in every_page():
        answer = client.get(page)
        if answer.status_code == 200 and "html" in answer.get("content-type", ""):
            for found in re.findall(r'href="([^"]*\?[^"]+)"', answer.content.decode()):
                link = html.unescape(found)
                path = link.partition("?")[0] or page.partition("?")[0]
                if path in lists:
                    links.add(path + "?" + link.partition("?")[2])
    assert len(links) > 40
    broken = []
    for link in sorted(links):
        answer = client.get(link)
        if answer.status_code != 200 and not (answer.status_code == 302 and "e=1" not in answer["location"]):
            broken.append((link, answer.status_code))
    assert broken == []
