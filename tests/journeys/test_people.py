"""A colleague is invited, comes in, sets the second factor up, and signs in with a code."""

from datetime import timedelta
from typing import TYPE_CHECKING

import pyotp
import pytest
from django.contrib.auth.models import Group
from django.utils.timezone import now

from scheduling.identity import totp
from scheduling.management.commands.bootstrap import Command
from tests.journeys.conftest import add_cookies
from tests.support.screenshots import save_screenshot
from tests.support.waiting import WAIT_LIMIT_MS

if TYPE_CHECKING:
    pass


NAME, PASSWORD = "mei", "a password for mei alone"


def sign_in(page):
    page.goto("/admin/login/")
    page.fill("[name=username]", NAME)
    page.fill("[name=password]", PASSWORD)
    page.click("#login-form button[type=submit]")


@pytest.fixture
def new_page(chromium, site_url):
    """Open a page of a person who is not logged in."""
    contexts = []

    def new_page(width=1400):
        context = chromium.new_context(base_url=site_url, viewport={"width": width, "height": 900})
        contexts.append(context)
        add_cookies(context, site_url, "zh-hans")
        context.set_default_timeout(WAIT_LIMIT_MS)
        return context.new_page()

    yield new_page
    for context in contexts:
        context.close()


def test_people_invited_colleague_signs_in_with_a_code(ops, new_page, transactional_db, monkeypatch):
    from scheduling.models import TotpDevice

    monkeypatch.setattr(totp, "DRIFT", 10)  # a code lasts five minutes on a machine that stalls
    Command().grant_permissions()
    assert Group.objects.filter(name="operator").exists()
    admin = ops()
    admin.goto("/admin/scheduling/invitation/add/")
    admin.fill("[name=name]", NAME)
    admin.fill("[name=email]", "mei@example.com")
    admin.select_option("[name=role]", "operator")
    admin.click("[name=_save]")
    link = admin.inner_text("#invitation-link").strip()
    save_screenshot(admin, "people-link")
    admin.goto("/admin/scheduling/invitation/")
    save_screenshot(admin, "people-invitations")

    mei = new_page()
    mei.goto("/admin/" + link.partition("/admin/")[2])
    mei.fill("[name=password1]", PASSWORD)
    mei.fill("[name=password2]", PASSWORD)
    save_screenshot(mei, "people-accept")
    mei.click("#acceptance-form button[type=submit]")
    mei.wait_for_selector("#login-form")
    save_screenshot(mei, "people-login")
    sign_in(mei)
    mei.wait_for_selector("#nav-sidebar-apps", state="attached")
    mei.goto("/admin/account/")
    mei.click("button[value=start]")
    secret = mei.inner_text("#totp-secret").replace(" ", "")
    save_screenshot(mei, "people-enrolment")
    mei.fill("[name=code]", pyotp.TOTP(secret).now())
    mei.click("button[value=confirm]")
    assert len(mei.inner_text("#recovery-codes").split()) == 10
    save_screenshot(mei, "people-codes")

    phone = new_page(390)
    sign_in(phone)
    phone.wait_for_selector("#code-form")
    save_screenshot(phone, "people-code")
    phone.fill("[name=code]", pyotp.TOTP(secret).at(now() + timedelta(seconds=30)))
    phone.click("#code-form button[type=submit]")
    phone.wait_for_selector("#nav-sidebar-apps", state="attached")
    assert TotpDevice.objects.get().last_step
    mei.goto("/admin/account/")
    assert mei.locator("#sign-ins tbody tr").count() == 2
    save_screenshot(mei, "people-account")
    phone.goto("/admin/account/")
    save_screenshot(phone, "people-account-narrow")
    mei.click("#sign-ins button.at-danger")
    phone.goto("/admin/account/")
    phone.wait_for_selector("#login-form")
    admin.goto("/admin/auth/user/")
    save_screenshot(admin, "people-users")
    admin.click(f"text={NAME}")
    admin.wait_for_selector("[name=role]")
    save_screenshot(admin, "people-user")
