"""A colleague comes in by a link that works once."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from django.contrib.auth.models import User
from django.db import connection
from django.db.models import F
from django.test import Client
from django.test.utils import CaptureQueriesContext
from django.urls import reverse
from pytest_django import Settings

from scheduling.identity import invitations
from scheduling.identity.invitations import find_role
from scheduling.models import Invitation
from tests.support.second_connection import Race

pytestmark = pytest.mark.django_db

PASSWORD = "a long one for 1 person"


def accept(link: str, name: str = "bob", client: Client | None = None) -> Any:
    data = {"username": name, "password1": PASSWORD, "password2": PASSWORD}
    return (client or Client(headers={"accept-language": "en"})).post(link, data)


def invite(ann: User, role: str = "operator") -> str:
    _row, token = invitations.create_invitation("bob", "bob@example.com", role, ann)
    return reverse("admin:invitation_accept", args=[token])


def test_invitation_leads_to_a_user_with_the_role(as_member: Callable[[str], Client]) -> None:
    page = as_member("admin").post(
        reverse("admin:scheduling_invitation_add"), {"name": "bob", "email": "bob@example.com", "role": "operator"}
    )
    assert "no-store" in page["Cache-Control"]
    link = page.context["link"]
    assert link.rpartition("/invitation/")[2].strip("/") not in str(Invitation.objects.values().get())
    assert Client().get(link).status_code == 200
    assert accept(link).url == reverse("admin:index")
    bob = User.objects.get(username="bob")
    assert (bob.is_staff, bob.is_superuser, find_role(bob), bob.email) == (True, False, "operator", "bob@example.com")
    assert Client().login(username="bob", password=PASSWORD)
    assert accept(link, "eve").status_code == 404
    assert not User.objects.filter(username="eve").exists()


@pytest.mark.django_db(transaction=True)
def test_invitation_accepted_twice_at_once_stores_one_user(race: Race, ann: User) -> None:
    link = invite(ann)
    answers = race(4, lambda at: accept(link, f"user{at}").status_code)
    assert sorted(answers) == [302, 404, 404, 404]
    assert User.objects.exclude(pk=ann.pk).count() == 1


def test_invitation_withdrawn_or_expired_is_refused(ann: User, as_member: Callable[[str], Client]) -> None:
    link = invite(ann)
    row = Invitation.objects.get()
    as_member("admin").post(reverse("admin:scheduling_invitation_withdraw", args=[row.pk]))
    assert accept(link).status_code == 404
    link = invite(ann)
    Invitation.objects.update(expires_at=F("expires_at") - invitations.VALID_FOR)
    assert accept(link).status_code == 404
    assert not User.objects.filter(username="bob").exists()


@pytest.mark.parametrize(
    ("ends", "says"),
    [
        (lambda ann: User.objects.update(is_active=False), "may not invite any more"),
        (lambda ann: User.objects.update(is_superuser=False), "may not invite any more"),
        (lambda ann: ann.delete(), "may not invite any more"),
        (lambda ann: None, "identity provider"),
    ],
    ids=["disabled", "no right", "deleted", "provider only"],
)
def test_invitation_without_a_valid_inviter_is_refused(
    ann: User, settings: Settings, ends: Callable[[User], Any], says: str
) -> None:
    """The link of a dismissed administrator let a person in for three days, with a password where none is wanted."""
    link = invite(ann, "administrator")
    ends(ann)
    settings.AFTERTOUCH_OIDC_ONLY = says == "identity provider"
    page = Client(headers={"accept-language": "en"}).get(link)
    assert (page.status_code, says in page.content.decode()) == (404, True)
    assert says in accept(link).content.decode()
    assert not User.objects.filter(username="bob").exists()


@pytest.mark.django_db(transaction=True)
def test_invitation_accepted_while_the_inviter_is_disabled_has_one_outcome(race: Race, ann: User) -> None:
    """Either the user was stored before the right ended, or the link is refused. The second of two stores none."""
    link = invite(ann)

    def act(number: int) -> int:
        if number == 0:
            return User.objects.filter(pk=ann.pk).update(is_active=False) * 0
        return int(accept(link, f"user{number}").status_code)

    answers = sorted(race(4, act))[1:]
    stored = User.objects.exclude(pk=ann.pk).count()
    assert answers == [404] * 3 if stored == 0 else answers == [302, 404, 404]
    assert stored <= 1


def test_invitation_page_names_what_is_wrong(ann: User, as_member: Callable[[str], Client]) -> None:
    page = as_member("admin").post(reverse("admin:scheduling_invitation_add"), {"role": "viewer"})
    assert "name" in page.context["adminform"].form.errors
    assert not Invitation.objects.exists()
    link = invite(ann, "administrator")
    client = Client(headers={"accept-language": "en"})
    page = client.post(link, {"username": "ann", "password1": "short", "password2": "short"})
    assert set(page.context["form"].errors) == {"username", "password2"}
    assert accept(link).status_code == 302, "a refused form uses the link not up"
    assert User.objects.get(username="bob").is_superuser


def test_invitation_is_mailed_after_the_commit(
    ann: User, settings: Settings, mailoutbox: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    row, token = invitations.create_invitation("bob", "bob@example.com", "viewer", ann)
    link = invitations.build_link(token)
    assert invitations.mail_invitation(row, link) is None, "no relay is set"
    settings.AFTERTOUCH_EMAIL_URL = "smtp://127.0.0.1:1"
    assert invitations.mail_invitation(row, link) is False, "the relay does not answer"


def test_user_form_has_role_first_and_new_role_replaces_rights(as_member: Callable[[str], Client], ann: User) -> None:
    admin = as_member("admin")
    accept(invite(ann, "operator"))
    bob = User.objects.get(username="bob")
    page = admin.get(reverse("admin:auth_user_change", args=[bob.pk]))
    form = page.context["adminform"].form
    assert form["role"].value() == "operator"
    data = {"username": "bob", "role": "editor", "is_active": "on", "is_staff": "on"}
    data |= {"groups": [str(group.pk) for group in bob.groups.all()]}
    with CaptureQueriesContext(connection) as queries:
        assert admin.post(reverse("admin:auth_user_change", args=[bob.pk]), data).status_code == 302
    assert find_role(User.objects.get(pk=bob.pk)) == "editor"
    statements = [each["sql"] for each in queries]
    assert statements.count("SET CONSTRAINTS ALL IMMEDIATE") == 1
    role_at = max(number for number, each in enumerate(statements) if 'INTO "auth_user_groups"' in each)
    assert role_at < statements.index("SET CONSTRAINTS ALL IMMEDIATE")
