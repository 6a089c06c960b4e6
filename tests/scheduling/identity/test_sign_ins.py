"""A user sees and ends sign-ins."""

from __future__ import annotations

import pytest
from django.contrib.auth.models import User
from django.contrib.sessions.models import Session
from django.test import Client
from django.urls import reverse
from django.utils.timezone import now

from scheduling.identity import sign_ins
from scheduling.identity.sign_ins import SessionStore
from scheduling.models import SignIn
from tests.scheduling.identity.conftest import is_inside

pytestmark = pytest.mark.django_db

FIREFOX = "Mozilla/5.0 (X11; Linux x86_64; rv:140.0) Gecko/20100101 Firefox/140.0"


def sign_in(name: str = "ann", address: str = "192.0.2.1") -> Client:
    client = Client(REMOTE_ADDR=address, headers={"user-agent": FIREFOX, "accept-language": "en"})
    client.post(reverse("admin:login"), {"username": name, "password": "right"})
    client.cookies["django_language"] = "en"
    return client


def test_account_lists_own_sign_ins_and_marks_the_current_one(ann: User) -> None:
    User.objects.create_superuser("bob", password="right")
    sign_in("bob", "192.0.2.9")
    other, current = sign_in(), sign_in(address="192.0.2.2")
    page = current.get(reverse("admin:account"))
    text = page.content.decode()
    assert [each["row"].address for each in page.context["sign_ins"]] == ["192.0.2.2", "192.0.2.1"]
    assert [each["is_current"] for each in page.context["sign_ins"]] == [True, False]
    assert "Firefox · Linux" in text
    keys = [client.cookies["sessionid"].value for client in (other, current)]
    assert not any(key in text or key in str(list(SignIn.objects.values())) for key in keys)


def test_database_holds_no_key_of_a_session(ann: User) -> None:
    client = sign_in()
    key, stored = client.cookies["sessionid"].value, Session.objects.get().session_key
    assert key not in str([*Session.objects.values(), *SignIn.objects.values()])
    client.cookies["sessionid"] = stored
    assert not is_inside(client)
    client.cookies["sessionid"] = key
    assert is_inside(client)


def test_account_signs_one_and_then_all_others_out(ann: User) -> None:
    other, current = sign_in(), sign_in(address="192.0.2.2")
    row = SignIn.objects.get(address="192.0.2.1")
    current.post(reverse("admin:account_end_sign_in", args=[row.pk]))
    assert not is_inside(other)
    assert is_inside(current)
    assert Session.objects.count() == SignIn.objects.count() == 1
    others = [sign_in() for _ in range(2)]
    current.post(reverse("admin:account_end_others"))
    assert [is_inside(each) for each in others] == [False, False]
    assert is_inside(current)


def test_account_cannot_sign_other_users_out(ann: User) -> None:
    User.objects.create_superuser("bob", password="right")
    bob, current = sign_in("bob"), sign_in()
    answer = current.post(reverse("admin:account_end_sign_in", args=[SignIn.objects.get(user__username="bob").pk]))
    assert answer.status_code == 404
    current.post(reverse("admin:account_end_others"))
    assert is_inside(bob)


def test_sign_in_ends_with_logout_and_follows_a_new_password(ann: User) -> None:
    client = sign_in()
    data = {"old_password": "right", "new_password1": "Kx7-longer-one", "new_password2": "Kx7-longer-one"}
    assert client.post(reverse("admin:password_change"), data).status_code == 302
    [row] = sign_ins.list_sign_ins(ann)
    assert row.digest == sign_ins.hash_session_key(client.cookies["sessionid"].value)
    client.post(reverse("admin:logout"))
    assert not SignIn.objects.exists()


def test_cleanup_deletes_sign_ins_of_expired_sessions(ann: User) -> None:
    sign_in()
    Session.objects.update(expire_date=now().replace(year=2020))
    SignIn.objects.update(signed_in_at=now().replace(year=2020))
    assert sign_ins.list_sign_ins(ann) == []
    sign_in()
    SessionStore.clear_expired()
    assert SignIn.objects.count() == Session.objects.count() == 1
