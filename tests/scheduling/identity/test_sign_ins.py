"""A user sees and ends sign-ins."""

from __future__ import annotations

import pytest
from django.contrib.auth.models import User
from django.contrib.sessions.models import Session
from django.test import Client
from django.urls import reverse
from django.utils.timezone import now

from scheduling.identity.sign_ins import list_sign_ins
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
    assert not any(key in text for key in keys)


def test_account_signs_one_and_then_all_others_out(ann: User) -> None:
    other, current = sign_in(), sign_in(address="192.0.2.2")
    [digest] = [each.digest for each in list_sign_ins(ann) if each.address == "192.0.2.1"]
    current.post(reverse("admin:account_end_sign_in", args=[digest]))
    assert not is_inside(other)
    assert is_inside(current)
    assert Session.objects.count() == len(list_sign_ins(ann)) == 1
    others = [sign_in() for _ in range(2)]
    current.post(reverse("admin:account_end_others"))
    assert [is_inside(each) for each in others] == [False, False]
    assert is_inside(current)


def test_account_cannot_sign_other_users_out(ann: User) -> None:
    other = User.objects.create_superuser("bob", password="right")
    bob, current = sign_in("bob"), sign_in()
    [digest] = [each.digest for each in list_sign_ins(other)]
    answer = current.post(reverse("admin:account_end_sign_in", args=[digest]))
    assert answer.status_code == 404
    current.post(reverse("admin:account_end_others"))
    assert is_inside(bob)


def test_sign_in_ends_with_logout_and_follows_a_new_password(ann: User) -> None:
    client = sign_in()
    data = {"old_password": "right", "new_password1": "Kx7-longer-one", "new_password2": "Kx7-longer-one"}
    assert client.post(reverse("admin:password_change"), data).status_code == 302
    [row] = list_sign_ins(ann)
    assert (row.session_key, row.address) == (client.cookies["sessionid"].value, "192.0.2.1")
    client.post(reverse("admin:logout"))
    assert list_sign_ins(ann) == []


def test_sign_in_of_an_expired_session_is_not_listed(ann: User) -> None:
    """`test_retention_deletes_admin_sessions` holds that it is deleted."""
    sign_in()
    Session.objects.update(expire_date=now().replace(year=2020))
    assert list_sign_ins(ann) == []
