"""The limits and the dynamic delays, through the forms in which editors change them."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest
from django.test import Client

from scheduling.models import DelayRule, HarassmentRule, Holdout
from tests.scheduling.admin.conftest import FillForm, FormErrors, SaveForm, Url
from tests.support.matrix import MatrixBuilder

pytestmark = pytest.mark.django_db

HOUR = timedelta(hours=1)


@pytest.fixture
def cap(matrix: MatrixBuilder) -> HarassmentRule:
    """Three in 24 hours."""
    return HarassmentRule.objects.get(kind="cap")


@pytest.fixture
def delays(matrix: MatrixBuilder) -> DelayRule:
    DelayRule.objects.all().delete()
    return DelayRule.objects.create(pk=1, by_level={"vip": 3600, "normal": 7200})


def read_last_change(row: Any) -> tuple[int, str, str | None]:
    """The last change: its version, who made it and why."""
    last = row.history.latest()
    return last.version, last.history_user.username, last.history_change_reason


def test_rule_save_stores_version_author_and_reason(
    cap: HarassmentRule, editor: Client, admin_url: Url, fill_form: FillForm, save_form: SaveForm
) -> None:
    url, version = admin_url("harassmentrule_change", cap.pk), cap.version
    parts = {"limits": "vip=5，normal=2", "channel": "log", "category": "marketing", "tag": "sale"}
    save_form(url, limit="2", window="48h", change_reason="too many complaints", **parts)
    cap.refresh_from_db()
    assert (cap.limit, cap.window, cap.version) == (2, 48 * HOUR, version + 1)
    assert (cap.limits, cap.channel, cap.category, cap.tag) == ({"vip": 5, "normal": 2}, "log", "marketing", "sale")
    assert fill_form(url)["limits"] == "vip=5, normal=2"
    assert read_last_change(cap) == (version + 1, "editor", "too many complaints")
    cap.limit = 4
    cap.save()
    history = editor.get(admin_url("harassmentrule_history", cap.pk)).content.decode()
    assert all(words in history for words in ("too many complaints", "editor", "system or configuration file"))
    page = editor.get(admin_url("harassmentrule_changelist")).content.decode()
    assert "At most 4 (vip=5, normal=2) in 2 days (Customer) · log · Marketing (blocked by opt-out) · sale" in page


def test_delay_save_stores_version_author_and_reason(delays: DelayRule, admin_url: Url, save_form: SaveForm) -> None:
    url, version = admin_url("delayrule_change", delays.pk), delays.version
    changes = {"by_level": "vip=30m, normal=3h", "default": "2d", "active_factor": "0.5", "change_reason": "vips wait"}
    save_form(url, **changes)
    delays.refresh_from_db()
    assert delays.by_level == {"vip": 1800, "normal": 10800}
    assert (delays.default, delays.active_factor, delays.version) == (48 * HOUR, 0.5, version + 1)
    assert read_last_change(delays) == (version + 1, "editor", "vips wait")


def test_rule_form_errors_name_the_field(cap: HarassmentRule, list_form_errors: FormErrors, admin_url: Url) -> None:
    wrong: list[tuple[dict[str, Any], str]] = [
        ({"channel": "fax"}, "channel"), ({"limits": "vip=many"}, "limits"), ({"limits": "vip=0"}, "limits"),
        ({"limits": "vip=5", "scope": "community"}, "limits"), ({"kind": "conversation", "tag": "sale"}, "tag"),
        ({"kind": "conversation", "scope": "community"}, "scope"), ({"limit": "0"}, "limit"),
        ({"limit": None}, "limit"),
        ({"window": "0s"}, "window"), ({"window": "soon"}, "window"), ({"window": None}, "window"),
    ]  # fmt: skip
    changes_so_far = cap.history.count()
    errors = list_form_errors(admin_url("harassmentrule_change", cap.pk), *(changes for changes, _ in wrong))
    assert [list(each) for each in errors] == [[field] for _, field in wrong]
    cap.refresh_from_db()
    assert (cap.limit, cap.window, cap.history.count()) == (3, 24 * HOUR, changes_so_far)


def test_global_holdout_is_edited_with_history(
    matrix: MatrixBuilder, admin_url: Url, save_form: SaveForm, list_form_errors: FormErrors
) -> None:
    Holdout.objects.create(pk=1)
    url = admin_url("holdout_change", 1)
    save_form(url, percent="2.5", key="2026", change_reason="measure")
    row = Holdout.objects.get()
    assert (row.percent, row.key) == (2.5, "2026")
    assert read_last_change(row) == (2, "editor", "measure")
    assert [list(each) for each in list_form_errors(url, {"percent": "101"})] == [["percent"]]


def test_delay_form_errors_name_the_field(delays: DelayRule, list_form_errors: FormErrors, admin_url: Url) -> None:
    wrong = [
        ({"by_level": "vip=soon"}, "by_level"), ({"by_level": "vip"}, "by_level"), ({"default": "-1h"}, "default"),
        ({"active_factor": "-1"}, "active_factor"), ({"active_within": "a while"}, "active_within"),
    ]  # fmt: skip
    errors = list_form_errors(admin_url("delayrule_change", delays.pk), *(changes for changes, _ in wrong))
    assert [list(each) for each in errors] == [[field] for _, field in wrong]
    delays.refresh_from_db()
    assert delays.by_level == {"vip": 3600, "normal": 7200}
