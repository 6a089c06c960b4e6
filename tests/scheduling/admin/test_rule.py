"""The limits and the dynamic delays, through the forms in which editors change them."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest
from django.contrib.admin.utils import flatten
from django.test import Client

from scheduling.models import DelayRule, HarassmentRule, Holdout
from tests.scheduling.admin.conftest import CheckFormErrors, FillForm, SaveForm, Url
from tests.support.matrix import MatrixBuilder
from tests.support.undrawn import read_refusal

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


def test_edits_store_values_version_author_and_reason(
    cap: HarassmentRule, delays: DelayRule, admin_url: Url, save_form: SaveForm
) -> None:
    edits: tuple[tuple[Any, dict[str, str], dict[str, Any]], ...] = (
        (
            cap,
            {"limit": "2", "window": "48h", "limits": "vip=5，normal=2", "channel": "log", "category": "marketing",
             "tag": "sale"},
            {"limit": 2, "window": 48 * HOUR, "limits": {"vip": 5, "normal": 2}, "channel": "log",
             "category": "marketing", "tag": "sale"},
        ),
        (
            delays,
            {"by_level": "vip=30m, normal=3h", "default": "2d", "active_factor": "0.5"},
            {"by_level": {"vip": 1800, "normal": 10800}, "default": 48 * HOUR, "active_factor": 0.5},
        ),
        (Holdout.objects.create(pk=1), {"percent": "2.5", "key": "2026"}, {"percent": 2.5, "key": "2026"}),
    )  # fmt: skip
    for row, changes, stored in edits:
        version = row.version
        save_form(admin_url(f"{row._meta.model_name}_change", row.pk), change_reason="measured", **changes)
        row.refresh_from_db()
        assert {name: getattr(row, name) for name in stored} == stored
        last = row.history.latest()
        told = (last.version, last.history_user.username, last.history_change_reason)
        assert told == (version + 1, "editor", "measured")


def test_rule_is_shown_as_a_sentence_with_its_history(
    cap: HarassmentRule, editor: Client, admin_url: Url, fill_form: FillForm
) -> None:
    cap.limit, cap.limits, cap.window = 4, {"vip": 5, "normal": 2}, 48 * HOUR
    cap.channel, cap.category, cap.tag = "log", "marketing", "sale"
    cap.save()
    assert fill_form(admin_url("harassmentrule_change", cap.pk))["limits"] == "vip=5, normal=2"
    history = editor.get(admin_url("harassmentrule_history", cap.pk)).content.decode()
    assert "system or configuration file" in history
    page = editor.get(admin_url("harassmentrule_changelist")).content.decode()
    assert "At most 4 (vip=5, normal=2) in 2 days (Customer) · log · Marketing (blocked by opt-out) · sale" in page


def test_rule_form_errors_name_the_field(
    cap: HarassmentRule, check_form_errors: CheckFormErrors, admin_url: Url
) -> None:
    changes_so_far = cap.history.count()
    check_form_errors(
        admin_url("harassmentrule_change", cap.pk),
        ({"channel": "fax"}, "channel"), ({"limits": "vip=many"}, "limits"), ({"limits": "vip=0"}, "limits"),
        ({"limits": "vip=5", "scope": "community"}, "limits"), ({"kind": "conversation", "tag": "sale"}, "tag"),
        ({"kind": "conversation", "scope": "community"}, "scope"), ({"limit": "0"}, "limit"),
        ({"limit": None}, "limit"), ({"window": "0s"}, "window"), ({"window": "soon"}, "window"),
        ({"window": None}, "window"),
    )  # fmt: skip
    cap.refresh_from_db()
    assert (cap.limit, cap.window, cap.history.count()) == (3, 24 * HOUR, changes_so_far)


def test_error_of_a_field_of_another_kind_is_seen(
    cap: HarassmentRule, editor: Client, admin_url: Url, fill_form: FillForm
) -> None:
    """The form hides the fields of other kinds: a channel of the cap kept it from becoming another rule, unseen."""
    HarassmentRule.objects.update(channel="log")
    url = admin_url("harassmentrule_change", cap.pk)
    form = read_refusal(editor, url, fill_form(url, kind="conversation"))["adminform"]
    assert list(form.form.errors) == ["channel"]
    hidden = [options["fields"] for _name, options in form.fieldsets if options.get("classes")]
    assert not any("channel" in flatten(fields) for fields in hidden)
    assert any("window" in flatten(fields) for fields in hidden)


def test_delay_and_holdout_form_errors_name_the_field(
    delays: DelayRule, check_form_errors: CheckFormErrors, admin_url: Url
) -> None:
    check_form_errors(
        admin_url("delayrule_change", delays.pk),
        ({"by_level": "vip=soon"}, "by_level"), ({"by_level": "vip"}, "by_level"), ({"default": "-1h"}, "default"),
        ({"active_factor": "-1"}, "active_factor"), ({"active_within": "a while"}, "active_within"),
    )  # fmt: skip
    delays.refresh_from_db()
    assert delays.by_level == {"vip": 3600, "normal": 7200}
    Holdout.objects.create(pk=1)
    check_form_errors(admin_url("holdout_change", 1), ({"percent": "101"}, "percent"))
