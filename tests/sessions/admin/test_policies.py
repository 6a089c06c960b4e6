"""Ops decide how long silence may last: what they save is checked, remembered, and in the store at once."""

import re
from datetime import timedelta

import pytest
from django.urls import reverse
from django.utils.timezone import now

from scheduling.models import Calendar
from sessions.models import Campaign, SilencePolicy
from tests.sessions.admin.conftest import text, url
from tests.support.tables import each_row
from tests.support.undrawn import read_refusal

pytestmark = pytest.mark.django_db

SECOND = timedelta(seconds=1)
VIP = {
    "key": "vip", "tags": "", "after": "any", "grace_for": "all", "hours": "", "threshold": "3m",
    "jitter": "5s", "grace": "0s", "max_nudges": "2", "growth": "2",
    "change_reason": "they take their time",
}  # fmt: skip
SALE = {
    "key": "double-11", "threshold": "90s", "starts_at_0": "2026-11-11", "starts_at_1": "00:00:00",
    "ends_at_0": "2026-11-12", "ends_at_1": "00:00:00", "enabled": "on", "change_reason": "",
}  # fmt: skip


@pytest.fixture
def default():
    row, _ = SilencePolicy.objects.get_or_create(key="default", defaults={"threshold": 60 * SECOND})
    return row


def test_policy_is_not_restored_beside_one_of_the_same_tags(editor, chats):
    old = SilencePolicy.objects.create(key="old", tags=["vip"], threshold=60 * SECOND, retired_at=now())
    SilencePolicy.objects.create(key="new", tags=["vip"], threshold=90 * SECOND)
    restore = url("silencepolicy_bring_back", old.pk)
    assert "The policy new has the same tags." in text(editor.post(restore, follow=True))
    old.refresh_from_db()
    assert old.retired_at is not None
    SilencePolicy.objects.filter(key="new").update(after="customer")  # both apply
    editor.post(restore)
    old.refresh_from_db()
    assert old.retired_at is None


def test_calendar_is_kept_while_the_hours_of_a_policy_name_it(editor):
    """The exported configuration was refused: its policy named no calendar."""
    germany = Calendar.objects.create(key="germany", country="DE")
    window = {"days": ["working"], "from": "09:00", "to": "18:00", "calendar": "germany"}
    SilencePolicy.objects.create(key="vip", tags=["vip"], threshold=60 * SECOND, hours=[window])
    page = text(editor.post(reverse("admin:scheduling_calendar_retire", args=[germany.pk]), follow=True))
    assert "Still used by: silence policy vip." in page
    germany.refresh_from_db()
    assert germany.retired_at is None


@each_row(
    "field, value, said",
    [
        ("threshold", "1s", "must be between 2s and 12h"), ("threshold", "soon", "is not a duration"),
        ("key", "default", "already exists"),
    ],
)  # fmt: skip
def test_policy_form_shows_errors_at_fields(editor, default, field, value, said):
    """`test_policies` of the folder above has all limits."""
    errors = read_refusal(editor, url("silencepolicy_add"), {**VIP, field: value})["adminform"].form.errors
    assert list(errors) == [field]
    assert said in str(errors)
    assert not SilencePolicy.objects.exclude(key="default").exists()


def test_list_shows_the_gaps_that_the_store_keeps(editor):
    """A gap does not grow beyond 13 hours."""
    SilencePolicy.objects.create(key="vip", threshold=timedelta(hours=6), growth=4, max_nudges=3)
    assert "6 hours · 19 hours · 1 day 8 hours" in text(editor.get(url("silencepolicy_changelist")))


def test_default_policy_cannot_be_retired_or_renamed(editor, default):
    page = text(editor.get(url("silencepolicy_change", default.pk)))
    assert 'name="key"' not in page
    retire = re.search(r'href="([^"]*retire[^"]*)"', page)
    assert retire is not None
    assert "Every chat without another policy" in text(editor.get(retire[1]))
    editor.post(retire[1])
    default.refresh_from_db()
    assert default.retired_at is None
    other = SilencePolicy.objects.create(key="vip")
    editor.post(retire[1].replace(f"/{default.pk}/", f"/{other.pk}/"))
    other.refresh_from_db()
    assert other.retired_at is not None
    assert editor.post(url("silencepolicy_delete", other.pk), {"post": "yes"}).status_code == 403


def test_campaign_is_checked_and_its_history_shows_reason_and_values(editor):
    for changes, field, said in (
        ({"ends_at_0": "2026-11-10"}, "ends_at", "must be later than starts_at"),
        ({"threshold": "13h"}, "threshold", "between 2s and 12h"),
    ):
        errors = read_refusal(editor, url("campaign_add"), {**SALE, **changes})["adminform"].form.errors
        assert list(errors) == [field]
        assert said in str(errors)
    assert editor.post(url("campaign_add"), SALE).status_code == 302
    row = Campaign.objects.get()
    assert (row.key, row.threshold, row.ends_at - row.starts_at) == ("double-11", 90 * SECOND, timedelta(days=1))
    editor.post(url("campaign_change", row.pk), {**SALE, "threshold": "2m", "change_reason": "calmer"})
    history = text(editor.get(url("campaign_history", row.pk)))
    assert all(said in history for said in ("calmer", "1m30s"))


def test_campaign_list_shows_state(editor):
    hour = timedelta(hours=1)
    for key, begins, ends in (("now", -1, 1), ("later", 1, 2), ("past", -2, -1), ("off", -1, 1)):
        at = {"starts_at": now() + begins * hour, "ends_at": now() + ends * hour}
        Campaign.objects.create(key=key, enabled=key != "off", **at)
    page = text(editor.get(url("campaign_changelist")))
    assert [said for said in ("Runs for", "Starts in", "Over", "Switched off") if said not in page] == []
