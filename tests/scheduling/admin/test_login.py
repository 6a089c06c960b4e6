"""Password guessing is stopped; other users are not affected."""

from __future__ import annotations

from datetime import timedelta
from io import StringIO
from typing import Any

import pytest
from django.contrib.auth.models import User
from django.core.management import call_command
from django.db.models import F
from django.db.models.functions import Now
from django.test import Client
from django.urls import reverse
from pytest_django import Settings

from scheduling.models import AuditEntry, FailedLogin
from scheduling.web.login_lockout import ADDRESSES, ANY, KNOWN_FOR
from tests.support.second_connection import Race

pytestmark = pytest.mark.django_db

LOCKED = "Too many failed logins"


@pytest.fixture(autouse=True)
def ann(db: None) -> User:
    return User.objects.create_superuser("ann", password="right")


def attempt(password: str = "wrong", name: str = "ann", address: str = "192.0.2.1", language: str = "en") -> Any:
    """One login by a browser of its own. None where it came in."""
    client = Client(REMOTE_ADDR=address)
    client.cookies["django_language"] = language
    answer = client.post(reverse("admin:login"), {"username": name, "password": password})
    return answer.content.decode() if answer.status_code == 200 else None


def guess(times: int = 5, **how: str) -> None:
    for _ in range(times):
        assert attempt(**how) is not None


def test_login_five_failures_lock_name_and_address() -> None:
    guess(4)
    assert LOCKED in attempt()
    assert LOCKED in attempt("right")


def test_login_lock_spares_other_addresses_and_names() -> None:
    User.objects.create_superuser("bob", password="right")
    guess(6)
    assert attempt("right", address="192.0.2.2") is None
    assert attempt("right", name="bob") is None


def test_login_success_resets_the_count() -> None:
    for _ in range(3):
        guess(4)
        assert attempt("right") is None
    assert not FailedLogin.objects.filter(tries__gt=0).exclude(address=ANY).exists()


def test_login_many_addresses_lock_name_except_known(settings: Settings) -> None:
    settings.AFTERTOUCH_LOGIN_TRIES = 2
    assert attempt("right", address="198.51.100.1") is None
    for number in range(2 * ADDRESSES):
        assert attempt(address=f"192.0.2.{number}") is not None
    assert LOCKED in attempt("right", address="192.0.2.99")
    assert attempt("right", address="198.51.100.1") is None
    assert LOCKED in attempt("right", address="192.0.2.99"), "one login elsewhere does not release the name"


def test_login_old_known_address_is_not_exempt(settings: Settings) -> None:
    settings.AFTERTOUCH_LOGIN_TRIES = 1
    assert attempt("right") is None
    FailedLogin.objects.filter(address="192.0.2.1").update(succeeded_at=Now() - KNOWN_FOR)
    for number in range(2, 2 + ADDRESSES):
        attempt(address=f"192.0.2.{number}")
    assert LOCKED in attempt("right")


def test_cleanup_keeps_known_addresses_and_late_failures_only() -> None:
    assert attempt("right") is None
    guess(1, address="192.0.2.2")
    guess(1, name="somebody")
    FailedLogin.objects.update(last_at=F("last_at") - timedelta(days=2))
    guess(1, name="somebody else", address="192.0.2.3")
    found = FailedLogin.objects.exclude(address=ANY).order_by("address")
    assert list(found.values_list("address", flat=True)) == ["192.0.2.1", "192.0.2.3"]


def test_login_lock_ends_and_is_not_prolonged(settings: Settings) -> None:
    guess(5)
    last = FailedLogin.objects.exclude(address=ANY).get().last_at
    guess(3)
    assert FailedLogin.objects.exclude(address=ANY).get().last_at == last
    FailedLogin.objects.update(last_at=F("last_at") - settings.AFTERTOUCH_LOGIN_LOCKOUT - timedelta(seconds=1))
    assert LOCKED not in attempt()
    assert attempt("right") is None


def test_login_unknown_name_is_locked_and_not_stored() -> None:
    guess(5, name="my password by mistake")
    assert LOCKED in attempt(name="my password by mistake")
    row = FailedLogin.objects.exclude(address=ANY).get()
    assert row.user is None
    assert "mistake" not in str(row.__dict__)


def test_login_name_spellings_share_one_count() -> None:
    for spelling in ("ann", " ann ", "ａｎｎ", "ann", "ａnn"):
        attempt(name=spelling)
    assert LOCKED in attempt("right")


def test_login_ipv6_network_counts_as_one_address() -> None:
    for last in range(5):
        attempt(address=f"2001:db8:1:2::{last}")
    assert LOCKED in attempt("right", address="2001:db8:1:2:ffff::1")
    assert attempt("right", address="2001:db8:1:3::1") is None
    guess(5, address="::ffff:192.0.2.7")
    assert LOCKED in attempt("right", address="192.0.2.7")


def test_unlock_login_command_releases_the_name() -> None:
    guess(5)
    guess(5, address="192.0.2.2")
    said = StringIO()
    call_command("unlock_login", "ann", stdout=said)
    assert "2 addresses" in said.getvalue()
    assert attempt("right") is None
    assert AuditEntry.objects.filter(action="acted", label="ann", reason="Unlocked the login.").count() == 1
    call_command("unlock_login", "nobody", stdout=said)
    assert AuditEntry.objects.filter(action="acted").count() == 1


def test_login_count_works_without_redis(settings: Settings) -> None:
    settings.REDIS_URL = settings.CELERY_BROKER_URL = "redis://127.0.0.1:1/0"
    guess(4)
    assert attempt("right") is None


@pytest.mark.django_db(transaction=True)
def test_login_concurrent_failures_are_all_counted(race: Race) -> None:
    answers = race(16, lambda _at: attempt())
    assert len([page for page in answers if LOCKED not in page]) == 4
    assert FailedLogin.objects.exclude(address=ANY).get().tries == 5
    assert LOCKED in attempt("right")


def test_login_starts_a_new_session() -> None:
    """The session id from before the login is useless after it."""
    client = Client()
    session = client.session
    session["planted"] = True
    session.save()
    before = session.session_key
    client.post(reverse("admin:login"), {"username": "ann", "password": "right"})
    assert client.cookies["sessionid"].value != before
