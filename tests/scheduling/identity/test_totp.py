"""The second factor: each code is accepted once, wrong ones lock, and no session opens without it."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable
from datetime import timedelta
from io import StringIO
from typing import Any

import pyotp
import pytest
from django.contrib.admin.models import LogEntry
from django.contrib.auth.models import User
from django.core.management import CommandError, call_command
from django.db import OperationalError, connection
from django.test import Client
from django.urls import reverse
from django.utils.timezone import now
from pytest_django import Settings

from scheduling.identity import totp
from scheduling.identity.invitations import assign_roles
from scheduling.models import AuditEntry, TotpDevice
from tests.scheduling.identity.conftest import is_inside
from tests.support.second_connection import Race
from tests.support.tables import each_row

pytestmark = pytest.mark.django_db

FULL_WIDTH = str.maketrans("0123456789", "０１２３４５６７８９")


def enrol(user: User) -> tuple[str, list[str]]:
    """The secret and the recovery codes. The confirming code is two minutes old, so that the next one is not used."""
    totp.start_enrolment(user)
    device = TotpDevice.objects.get(user=user)
    codes = totp.confirm_enrolment(user, code_of(device.secret))
    assert codes is not None
    TotpDevice.objects.update(last_step=0)
    return device.secret, codes


def code_of(secret: str, steps: int = 0) -> str:
    return pyotp.TOTP(secret).at(int(now().timestamp()) + steps * totp.STEP)


def count_recovery_codes() -> int:
    return len(TotpDevice.objects.get().recovery_digests)


def open_login(client: Client, password: str = "right", target: str = "") -> Any:
    client.cookies["django_language"] = "en"
    data = {"username": "ann", "password": password, "next": target}
    return client.post(reverse("admin:login"), data)


def enter_code(client: Client, code: str) -> Any:
    return client.post(reverse("admin:login_code"), {"code": code})


def test_sign_in_with_second_factor_needs_password_and_code(ann: User, client: Client) -> None:
    secret, _codes = enrol(ann)
    assert open_login(client, target="/admin/account/").url == reverse("admin:login_code")
    assert not is_inside(client)
    assert enter_code(client, code_of(secret, 4)).status_code == 200
    assert not is_inside(client)
    assert enter_code(client, code_of(secret)).url == "/admin/account/"
    assert is_inside(client)


def test_code_without_a_fresh_password_opens_no_session(ann: User, client: Client, time_machine: Any) -> None:
    """Without one, too long after it, and after it was changed."""
    time_machine.move_to(now())
    secret, _codes = enrol(ann)
    assert enter_code(client, code_of(secret)).url == reverse("admin:login")
    open_login(client)
    time_machine.shift(timedelta(minutes=11))
    assert enter_code(client, code_of(secret)).url == reverse("admin:login")
    open_login(client)
    ann.set_password("another one")
    ann.save()
    assert enter_code(client, code_of(secret)).url == reverse("admin:login")
    assert not is_inside(client)


def test_audit_log_names_a_code_in_the_language_of_the_page(ann: User, client: Client) -> None:
    _secret, codes = enrol(ann)
    open_login(client)
    client.cookies["django_language"] = "zh-hans"
    enter_code(client, "000000")
    enter_code(client, codes[0])
    reasons = AuditEntry.objects.exclude(reason="").order_by("pk").values_list("reason", flat=True)
    assert list(reasons) == ["两步验证", "使用了恢复码"]


@each_row("steps, accepted", [(-2, False), (-1, True), (0, True), (1, True), (2, False)])
def test_code_is_accepted_within_one_step(ann: User, steps: int, accepted: bool, time_machine: Any) -> None:
    time_machine.move_to(now(), tick=False)
    secret, _codes = enrol(ann)
    assert totp.accept_code(ann, code_of(secret, steps)) is accepted


@each_row("write", [lambda code: f" {code[:3]} {code[3:]}", lambda code: code.translate(FULL_WIDTH)])
def test_code_in_groups_or_in_full_width_digits_is_accepted(ann: User, client: Client, write: Any) -> None:
    open_login(client)
    client.post(reverse("admin:account_second_factor"), {"do": "start"})
    data = {"do": "confirm", "code": write(code_of(TotpDevice.objects.get().secret))}
    assert "Recovery codes" in client.post(reverse("admin:account_second_factor"), data).content.decode()
    TotpDevice.objects.update(last_step=0)
    assert totp.accept_code(ann, write(code_of(TotpDevice.objects.get().secret)))
    assert not totp.accept_code(ann, "٣" * 6)


def test_code_is_accepted_once(ann: User, time_machine: Any) -> None:
    time_machine.move_to(now(), tick=False)
    totp.start_enrolment(ann)
    secret = TotpDevice.objects.get().secret
    assert totp.confirm_enrolment(ann, code_of(secret))
    assert not totp.accept_code(ann, code_of(secret)), "the code that confirmed"
    TotpDevice.objects.update(last_step=0)
    code = code_of(secret)
    assert totp.accept_code(ann, code)
    assert not totp.accept_code(ann, code)
    assert not totp.accept_code(ann, code_of(secret, -1)), "an older code was seen or skipped"
    assert totp.accept_code(ann, code_of(secret, 1))


@pytest.mark.django_db(transaction=True)
def test_code_of_concurrent_requests_opens_one_session(race: Race, ann: User) -> None:
    secret, _codes = enrol(ann)
    clients = [Client() for _ in range(4)]
    for each in clients:
        open_login(each)
    TotpDevice.objects.update(last_step=0)
    call_command("unlock_login", "ann", stdout=StringIO())
    code = code_of(secret)
    answers = race(4, lambda at: enter_code(clients[at], code).status_code)
    assert sorted(answers) == [200, 200, 200, 302]
    assert [is_inside(each) for each in clients].count(True) == 1


@pytest.mark.django_db(transaction=True)
def test_recovery_code_of_concurrent_requests_is_used_once(race: Race, ann: User) -> None:
    _secret, codes = enrol(ann)
    assert sorted(race(6, lambda _at: totp.accept_code(ann, codes[0]))) == [False] * 5 + [True]
    assert count_recovery_codes() == 9


def test_recovery_code_without_an_audit_entry_stays_usable(ann: User, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise OperationalError("the server ended the connection")

    _secret, codes = enrol(ann)
    with monkeypatch.context() as patched:
        patched.setattr(totp, "record_action", fail)
        with pytest.raises(OperationalError):
            totp.accept_code(ann, codes[0])
    assert count_recovery_codes() == 10
    assert totp.accept_code(ann, codes[0])
    assert AuditEntry.objects.get(action="acted").reason == "recovery code used"


@pytest.mark.django_db(transaction=True)
def test_enrolment_of_concurrent_requests_shows_codes_once(race: Race, ann: User) -> None:
    totp.start_enrolment(ann)
    code = code_of(TotpDevice.objects.get().secret)
    found = race(4, lambda _at: totp.confirm_enrolment(ann, code))
    [codes] = [each for each in found if each]
    assert count_recovery_codes() == 10
    assert totp.accept_code(ann, codes[3].upper())


def test_wrong_codes_lock_like_wrong_passwords(ann: User, client: Client) -> None:
    secret, codes = enrol(ann)
    open_login(client)
    pages = [enter_code(client, "000000").content.decode() for _ in range(4)]
    assert ["Too many failed logins" in page for page in pages] == [False, False, False, True]
    assert "Too many" in enter_code(client, code_of(secret)).content.decode()
    assert "Too many" in enter_code(client, codes[0]).content.decode()
    assert not is_inside(client)
    assert count_recovery_codes() == 10, "a locked sign-in uses no code up"


def test_right_codes_of_the_account_page_lock_no_name(as_member: Callable[[str], Client]) -> None:
    client = as_member("viewer")
    _secret, codes = enrol(User.objects.get(username="viewer"))
    for _time in range(6):
        page = client.post(reverse("admin:account_second_factor"), {"do": "codes", "code": codes[0]}).content.decode()
        codes = re.findall(r"^(?:.*>)?([a-z2-7]{4}(?:-[a-z2-7]{4}){3})$", page, re.M)
        assert len(codes) == 10


def test_required_second_factor_is_set_up_before_the_first_session(
    ann: User, client: Client, settings: Settings
) -> None:
    settings.AFTERTOUCH_REQUIRE_TOTP = True
    assert open_login(client).url == reverse("admin:login_enrolment")
    page = client.get(reverse("admin:login_enrolment")).content.decode()
    assert "<svg" in page
    assert not is_inside(client)
    assert client.post(reverse("admin:login_enrolment"), {"code": "000000"}).status_code == 200
    assert not is_inside(client)
    shown = client.post(reverse("admin:login_enrolment"), {"code": code_of(TotpDevice.objects.get().secret)})
    assert len(re.findall(r"^(?:.*>)?([a-z2-7]{4}(?:-[a-z2-7]{4}){3})$", shown.content.decode(), re.M)) == 10
    assert "no-store" in shown["Cache-Control"]
    assert is_inside(client)
    off = client.post(reverse("admin:account_second_factor"), {"do": "off", "code": code_of("A" * 32)})
    assert off.status_code == 200
    assert totp.find_device(ann)


def test_account_sets_up_and_turns_off(as_member: Callable[[str], Client]) -> None:
    client = as_member("viewer")
    user = User.objects.get(username="viewer")
    page = reverse("admin:account_second_factor")
    client.post(page, {"do": "start"})
    device = TotpDevice.objects.get(user=user)
    assert device.secret.replace(" ", "")[:4] in client.get(reverse("admin:account")).content.decode()
    client.post(page, {"do": "confirm", "code": code_of(device.secret)})
    assert totp.find_device(user)
    client.post(page, {"do": "off", "code": "123"})
    assert totp.find_device(user), "turning it off needs a code"
    TotpDevice.objects.update(last_step=0)
    client.post(page, {"do": "off", "code": code_of(device.secret)})
    assert not TotpDevice.objects.exists()


def turn_off_meanwhile(user: User, text: str) -> bool:
    """Accept a code; then another request turns the second factor off and starts a new enrolment."""
    totp.reset_totp(user)
    totp.start_enrolment(user)
    return True


def test_recovery_codes_need_a_confirmed_app(
    as_member: Callable[[str], Client], monkeypatch: pytest.MonkeyPatch
) -> None:
    client, user = as_member("viewer"), User.objects.get(username="viewer")
    _secret, codes = enrol(user)
    entries = LogEntry.objects.count(), AuditEntry.objects.count()
    with monkeypatch.context() as patch:
        patch.setattr(totp, "accept_code", turn_off_meanwhile)
        answer = client.post(reverse("admin:account_second_factor"), {"do": "codes", "code": codes[0]}, follow=True)
    assert "The second factor is off." in answer.content.decode()
    assert (LogEntry.objects.count(), AuditEntry.objects.count()) == entries
    assert count_recovery_codes() == 0
    assert totp.replace_recovery_codes(user) is None
    code = hashlib.sha256(b"AAAABBBBCCCCDDDD").hexdigest()
    TotpDevice.objects.update(recovery_digests=[code])
    assert not totp.accept_code(user, "aaaa-bbbb-cccc-dddd")
    TotpDevice.objects.update(confirmed_at=now())
    assert totp.accept_code(user, "aaaa-bbbb-cccc-dddd")


def test_secret_and_codes_are_stored_unreadable(ann: User) -> None:
    secret, codes = enrol(ann)
    with connection.cursor() as cursor:
        cursor.execute("SELECT secret || recovery_digests::text FROM scheduling_totpdevice")
        stored = "".join(row[0] for row in cursor.fetchall())
    assert secret not in stored
    assert codes[0] not in stored
    assert codes[0].replace("-", "").upper() not in stored


def make_secret_unreadable() -> None:
    with connection.cursor() as cursor:
        cursor.execute("UPDATE scheduling_totpdevice SET secret = 'x'")


def test_unreadable_secret_leaves_recovery_codes(ann: User) -> None:
    secret, codes = enrol(ann)
    make_secret_unreadable()
    assert not totp.accept_code(ann, code_of(secret))
    assert totp.accept_code(ann, codes[0])


def test_unreadable_secret_that_waits_is_replaced(ann: User, client: Client) -> None:
    open_login(client)
    page = reverse("admin:account_second_factor")
    client.post(page, {"do": "start"})
    make_secret_unreadable()
    assert 'value="start"' in client.get(reverse("admin:account")).content.decode()
    client.post(page, {"do": "start"})
    assert 'value="confirm"' in client.get(reverse("admin:account")).content.decode()


def test_administrator_and_command_reset(ann: User, as_member: Callable[[str], Client]) -> None:
    enrol(ann)
    as_member("admin").post(reverse("admin:auth_user_reset_second_factor", args=[ann.pk]))
    assert not TotpDevice.objects.exists()
    enrol(ann)
    said = StringIO()
    call_command("reset_totp", "ann", stdout=said)
    assert "removed" in said.getvalue()
    assert AuditEntry.objects.filter(actor="", label="ann", reason="Reset the second factor.").exists()
    assert not TotpDevice.objects.exists()
    with pytest.raises(CommandError, match="no user bob"):
        call_command("reset_totp", "bob")


def test_waiting_secret_is_replaced_by_a_later_enrolment(ann: User) -> None:
    """A person with the password alone may have read the first secret."""
    totp.start_enrolment(ann)
    first = totp.describe_enrolment(TotpDevice.objects.get(user=ann))["secret"]
    totp.start_enrolment(ann)
    assert totp.describe_enrolment(TotpDevice.objects.get(user=ann))["secret"] != first


def test_roles_that_are_given_are_in_the_audit_log(ann: User) -> None:
    assign_roles(ann, ["editor"], by="olga")
    assign_roles(ann, ["editor"], by="olga")
    assign_roles(ann, ["administrator"], by="olga")
    found = AuditEntry.objects.filter(label=ann.username).order_by("pk").values_list("actor", "changes")
    assert list(found) == [
        ("olga", [["role", "administrator", "editor"]]), ("olga", [["role", "editor", "administrator"]]),
    ]  # fmt: skip
