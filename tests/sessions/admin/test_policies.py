"""Ops decide how long silence may last: what they save is checked, remembered, and in the store at once."""

from __future__ import annotations

import re
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
from django.test import Client
from django.utils.timezone import now

from sessions.admin.policies import CampaignForm, SilencePolicyForm
from sessions.detection import policies
from sessions.models import Campaign, SilencePolicy
from sessions.store import sessions
from tests.sessions.admin.conftest import text, url
from tests.sessions.conftest import Chats
from tests.support.tables import each_row

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
Committed = Callable[..., Any]


def form_errors(page: str) -> str:
    return " ".join(re.findall(r"<li[^>]*>\s*([^<]*?)\s*</li>", page))


@pytest.fixture
def default() -> SilencePolicy:
    row, _ = SilencePolicy.objects.get_or_create(key="default", defaults={"threshold": 60 * SECOND})
    return row


def test_saved_policy_applies_from_the_next_frame(
    editor: Client, chats: Chats, default: SilencePolicy, django_capture_on_commit_callbacks: Committed
) -> None:
    policies.push_policies()
    armed = sessions.live_store().note_activity([_frame("s1", "vip")])[0].deadline_ms
    with django_capture_on_commit_callbacks(execute=True):
        assert editor.post(url("silencepolicy_add"), VIP).status_code == 302
    row = SilencePolicy.objects.get(key="vip")
    assert (row.threshold, row.max_nudges) == (180 * SECOND, 2)
    assert sessions.live_store().claim_silent(1, SECOND).versions == {policies.read_policies().version}
    later = sessions.live_store().note_activity([_frame("s2", "vip")])[0].deadline_ms
    assert later - armed > 100_000
    # Shorter for new waits; running timers keep their length.
    with django_capture_on_commit_callbacks(execute=True):
        editor.post(url("silencepolicy_change", row.pk), {**VIP, "threshold": "2s", "jitter": "0s"})
    assert sessions.live_store().claim_silent(10, SECOND).silences == []
    assert sessions.live_store().note_activity([_frame("s3", "vip")])[0].deadline_ms < later - 100_000


def test_policy_edit_keeps_concurrent_retirement(
    editor: Client, chats: Chats, default: SilencePolicy, monkeypatch: pytest.MonkeyPatch
) -> None:
    gone = now()

    def meanwhile(values: Any) -> None:
        SilencePolicy.objects.filter(key="vip").update(retired_at=gone)
        Campaign.objects.update(retired_at=gone)

    editor.post(url("silencepolicy_add"), VIP)
    editor.post(url("campaign_add"), SALE)
    policy, campaign = SilencePolicy.objects.get(key="vip"), Campaign.objects.get()
    monkeypatch.setattr(SilencePolicyForm, "check", staticmethod(meanwhile))
    monkeypatch.setattr(CampaignForm, "check", staticmethod(meanwhile))
    assert editor.post(url("silencepolicy_change", policy.pk), {**VIP, "threshold": "2m"}).status_code == 302
    assert editor.post(url("campaign_change", campaign.pk), {**SALE, "threshold": "40s"}).status_code == 302
    policy.refresh_from_db()
    campaign.refresh_from_db()
    assert (policy.threshold, policy.retired_at) == (120 * SECOND, gone)
    assert (campaign.threshold, campaign.retired_at) == (40 * SECOND, gone)


def _frame(session: str, tag: str) -> Any:
    from sessions.frames import Frame

    return Frame(session, "ann", tag=tag)


def test_policy_history_shows_user_reason_and_values(editor: Client, default: SilencePolicy) -> None:
    editor.post(url("silencepolicy_add"), VIP)
    row = SilencePolicy.objects.get(key="vip")
    editor.post(url("silencepolicy_change", row.pk), {**VIP, "threshold": "2m", "change_reason": "too slow"})
    row.refresh_from_db()
    assert row.version == 2
    page = text(editor.get(url("silencepolicy_history", row.pk)))
    for said in ("editor", "too slow", "they take their time", "3m", "2m"):
        assert said in page, said
    latest = row.history.latest()
    assert (latest.history_user.username, latest.threshold) == ("editor", 120 * SECOND)


@each_row(
    "field, value, said",
    [
        ("threshold", "1s", "must be between 2s and 12h"),
        ("threshold", "soon", "is not a duration"),
        ("jitter", "2h", "must not be longer than 1h"),
        ("grace", "11m", "must not be longer than 10m"),
        ("max_nudges", "11", "must be between 1 and 10"),
        ("growth", "0.5", "must be between 1 and 10"),
        ("key", "VIP customers", "must be lower-case letters"),
        ("key", "default", "already exists"),
    ],
)
def test_policy_form_shows_errors_at_fields(
    editor: Client, default: SilencePolicy, field: str, value: str, said: str
) -> None:
    answer = editor.post(url("silencepolicy_add"), {**VIP, field: value})
    form = answer.context["adminform"].form
    assert list(form.errors) == [field]
    assert said in form_errors(text(answer))
    assert not SilencePolicy.objects.exclude(key="default").exists()


def test_default_policy_cannot_be_retired_or_renamed(editor: Client, default: SilencePolicy) -> None:
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


def test_campaign_with_end_before_start_is_refused(editor: Client) -> None:
    answer = editor.post(url("campaign_add"), {**SALE, "ends_at_0": "2026-11-10"})
    assert list(answer.context["adminform"].form.errors) == ["ends_at"]
    assert "must be later than starts_at" in text(answer)
    assert "between 2s and 12h" in text(editor.post(url("campaign_add"), {**SALE, "threshold": "13h"}))
    assert editor.post(url("campaign_add"), SALE).status_code == 302
    row = Campaign.objects.get()
    assert (row.key, row.threshold, row.ends_at - row.starts_at) == ("double-11", 90 * SECOND, timedelta(days=1))
    editor.post(url("campaign_change", row.pk), {**SALE, "threshold": "2m", "change_reason": "calmer"})
    history = text(editor.get(url("campaign_history", row.pk)))
    assert "calmer" in history
    assert "1m30s" in history


@each_row(
    "begins, ends, enabled, said",
    [(-1, 1, True, "Runs for"), (1, 2, True, "Starts in"), (-2, -1, True, "Over"), (-1, 1, False, "Switched off")],
)
def test_campaign_list_shows_state(editor: Client, begins: int, ends: int, enabled: bool, said: str) -> None:
    hour = timedelta(hours=1)
    Campaign.objects.create(key="sale", starts_at=now() + begins * hour, ends_at=now() + ends * hour, enabled=enabled)
    assert said in text(editor.get(url("campaign_changelist")))


@each_row("group", ["viewer", "operator"])
def test_viewer_and_operator_cannot_change_policies(
    as_member: Callable[[str], Client], default: SilencePolicy, group: str
) -> None:
    client = as_member(group)
    campaign = Campaign.objects.create(key="sale", starts_at=now(), ends_at=now() + timedelta(hours=1))
    for page in (
        url("silencepolicy_changelist"), url("silencepolicy_change", default.pk),
        url("silencepolicy_history", default.pk), url("campaign_changelist"), url("campaign_change", campaign.pk),
    ):  # fmt: skip
        assert 'name="_save"' not in text(client.get(page)), page
    for act in (
        url("silencepolicy_add"), url("silencepolicy_change", default.pk), url("campaign_add"),
        url("campaign_change", campaign.pk), url("campaign_delete", campaign.pk),
    ):  # fmt: skip
        assert client.post(act, {**VIP, **SALE}).status_code == 403, act
    assert (SilencePolicy.objects.count(), Campaign.objects.count()) == (1, 1)
