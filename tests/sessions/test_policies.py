"""From what ops save to what the scripts read."""

from dataclasses import replace
from datetime import UTC, datetime, timedelta
from importlib import import_module

import pytest
from django.apps import apps
from django.core.exceptions import ValidationError
from django.db import OperationalError

from config.local.processes import select_port
from sessions.detection import policies
from sessions.frames import Frame
from sessions.models import Campaign, SilencePolicy
from sessions.policy import SHIPPED_DEFAULT, Policy, PolicySet
from sessions.store import sessions
from sessions.store.client import StoreUnavailable
from tests.support.tables import each_row

SECOND = timedelta(seconds=1)
NOW = datetime(2026, 11, 11, tzinfo=UTC)


def read_stored_versions():
    return set(sessions.live_store().claim_silent(1, SECOND).versions)


@pytest.mark.django_db
def test_migration_adds_default_policy():
    SilencePolicy.objects.all().delete()
    import_module("sessions.migrations.0001_initial").add_default_policy(apps, None)
    row = SilencePolicy.objects.get()
    assert (row.key, row.spec()) == ("default", replace(SHIPPED_DEFAULT, tags=[]))


@pytest.mark.django_db
def test_saved_policy_reaches_store_after_commit(chats, django_capture_on_commit_callbacks):
    with django_capture_on_commit_callbacks(execute=True):
        row = SilencePolicy.objects.create(key="vip", threshold=180 * SECOND)
    assert read_stored_versions() == {policies.read_policies().version}
    before = read_stored_versions()
    with django_capture_on_commit_callbacks(execute=True):
        row.threshold = 90 * SECOND
        row.save()
    assert (row.version, row.history.count()) == (2, 2)
    assert read_stored_versions() == {policies.read_policies().version} != before
    with django_capture_on_commit_callbacks(execute=True):
        Campaign.objects.create(key="sale", threshold=90 * SECOND, starts_at=NOW, ends_at=NOW + 60 * SECOND)
    assert read_stored_versions() == {policies.read_policies().version}
    assert len(policies.read_policies().campaigns) == 1


@pytest.mark.django_db
def test_retired_policies_and_disabled_campaigns_are_ignored():
    SilencePolicy.objects.get_or_create(key="default")
    SilencePolicy.objects.create(key="vip", threshold=180 * SECOND, retired_at=NOW)
    Campaign.objects.create(key="off", starts_at=NOW, ends_at=NOW + SECOND, enabled=False)
    Campaign.objects.create(key="gone", starts_at=NOW, ends_at=NOW + SECOND, retired_at=NOW)
    found = policies.read_policies()
    assert set(found.policies) == {"default"}
    assert found.campaigns == ()


@pytest.mark.django_db
def test_policy_save_without_store_succeeds(settings, django_capture_on_commit_callbacks):
    settings.REDIS_URL = f"redis://127.0.0.1:{select_port()}/0"
    with django_capture_on_commit_callbacks(execute=True):
        SilencePolicy.objects.create(key="vip")
    assert SilencePolicy.objects.filter(key="vip").exists()


@pytest.mark.django_db
def test_store_after_flush_without_database_uses_seen_policies(server, chats, monkeypatch):
    """A process that never read the tables has seen them in the store."""

    def away():
        raise OperationalError("gone")

    monkeypatch.setattr(policies, "read_policies", away)
    chats.policies(default=Policy(180 * SECOND))
    other = sessions.Store(server, policies.current_policies)
    other.note_activity([Frame("s1", "ann")])
    server.client.flushall()
    (noted,) = other.note_activity([Frame("s1", "ann")])
    assert noted.deadline_ms / 1000 - chats.now.timestamp() == pytest.approx(180, abs=60)  # not 60
    server.client.flushall()
    with pytest.raises(StoreUnavailable, match="policies are lost"):
        sessions.Store(server, policies.current_policies).note_activity([Frame("s1", "ann")])


def test_policy_version_depends_only_on_values():
    one = PolicySet({"a": Policy(), "b": Policy(2 * SECOND)})
    assert one.version == PolicySet({"b": Policy(2 * SECOND), "a": Policy()}).version
    assert one.version != PolicySet({"a": Policy(), "b": Policy(3 * SECOND)}).version
    assert PolicySet({}).version == PolicySet({"default": SHIPPED_DEFAULT}).version


@each_row(
    "values, field",
    [
        ({"key": "VIP"}, "key"),
        ({"key": "vip", "tags": ["a", "a"]}, "tags"),
        ({"key": "vip", "tags": ["a\nb"]}, "tags"),
        ({"threshold": SECOND}, "threshold"),
        ({"threshold": timedelta(hours=13)}, "threshold"),
        ({"jitter": timedelta(hours=2)}, "jitter"),
        ({"grace": timedelta(hours=1)}, "grace"),
        ({"max_nudges": 0}, "max_nudges"),
        ({"max_nudges": 11}, "max_nudges"),
        ({"growth": 0.5}, "growth"),
    ],
)
def test_check_policy_names_invalid_field(values, field):
    with pytest.raises(ValidationError) as refused:
        SilencePolicy(**{"key": "new"} | values).full_clean(validate_unique=False, validate_constraints=False)
    assert list(refused.value.error_dict) == [field]
