"""Named filters of a list: private ones, and shared ones."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from django.contrib.messages import get_messages
from django.test import Client

from scheduling.models import SavedFilter

pytestmark = pytest.mark.django_db

Url = Callable[..., str]
LISTS = pytest.mark.parametrize("listed", ["failedtask", "touch"])


def save_filter(client: Client, admin_url: Url, listed: str, name: str, query: str, **more: Any) -> Any:
    return client.post(admin_url(f"{listed}_save_filter"), {"name": name, "query": query, **more})


def links(client: Client, admin_url: Url, listed: str) -> dict[str, str]:
    page = client.get(admin_url(f"{listed}_changelist"))
    return {each["row"].name: each["row"].query for each in page.context["saved_filters"]}


@LISTS
def test_filter_is_saved_overwritten_and_deleted(viewer: Client, admin_url: Url, listed: str) -> None:
    page = viewer.get(f"{admin_url(f'{listed}_changelist')}?reason=cap&p=1")
    assert page.context["filter_here"] == "reason=cap"
    answer = save_filter(viewer, admin_url, listed, "caps", page.context["filter_here"])
    assert answer["location"] == f"{admin_url(f'{listed}_changelist')}?reason=cap"
    page = viewer.get(answer["location"]).content.decode()
    assert 'href="?reason=cap" aria-current="true"' in page
    save_filter(viewer, admin_url, listed, "caps", "reason=dedupe&p=3")
    assert links(viewer, admin_url, listed) == {"caps": "reason=dedupe"}
    assert viewer.post(admin_url(f"{listed}_delete_filter", SavedFilter.objects.get().pk)).status_code == 302
    assert links(viewer, admin_url, listed) == {}


@LISTS
def test_shared_filter_is_visible_but_not_deletable(
    operator: Client, viewer: Client, admin_url: Url, listed: str
) -> None:
    save_filter(operator, admin_url, listed, "mine", "reason=cap")
    save_filter(operator, admin_url, listed, "ours", "reason=dedupe", shared="on")
    assert links(viewer, admin_url, listed) == {"ours": "reason=dedupe"}
    other = {"failedtask": "touch", "touch": "failedtask"}[listed]
    assert links(operator, admin_url, other) == {}
    for row in SavedFilter.objects.all():
        assert viewer.post(admin_url(f"{listed}_delete_filter", row.pk)).status_code == 404
    assert SavedFilter.objects.count() == 2


@LISTS
def test_viewer_cannot_share_a_filter(viewer: Client, admin_url: Url, listed: str) -> None:
    assert save_filter(viewer, admin_url, listed, "ours", "reason=cap", shared="on").status_code == 403
    assert not SavedFilter.objects.exists()


def test_filter_needs_name_and_query(viewer: Client, admin_url: Url) -> None:
    for name, query in (("", "reason=cap"), ("x", ""), ("x", "p=3"), ("x" * 61, "reason=cap")):
        answer = save_filter(viewer, admin_url, "touch", name, query)
        assert str(list(get_messages(answer.wsgi_request))[-1]) == "A name and a filter are needed."
    assert not SavedFilter.objects.exists()
    save_filter(viewer, admin_url, "touch", "x" * 60, "reason=cap")
    assert links(viewer, admin_url, "touch") == {"x" * 60: "reason=cap"}, "the longest name that is kept"


def test_filter_link_is_escaped_and_stays_in_list(viewer: Client, admin_url: Url) -> None:
    save_filter(viewer, admin_url, "touch", "<b>", '"><script>=1&//evil.example=2')
    page = viewer.get(admin_url("touch_changelist")).content.decode()
    assert "<b>" not in page.partition("at-saved")[2].partition("changelist-form")[0]
    assert 'href="?%22%3E%3Cscript%3E=1&amp;%2F%2Fevil.example=2"' in page
