"""Every page works under the policy that it is sent with, in a real browser."""

import pytest
from django.urls import reverse

from tests.journeys.conftest import record_csp_violations
from tests.support.waiting import WAIT_LIMIT_MS


def test_scripts_of_the_back_office_run_under_its_policy(ops):
    """Alpine lives, and so do menus that only it opens. `test_accessibility` opens every page."""
    page = ops("en")
    page.goto(reverse("admin:scheduling_touch_changelist"))
    page.wait_for_function("() => window.Alpine && document.querySelector('[x-data]')._x_dataStack")


@pytest.mark.parametrize("path", ["/u/no-token", "/demo/chat/", "/api/v1/docs"])
def test_public_pages_follow_content_security_policy(chromium, site_url, path):
    context, violations = chromium.new_context(), []
    context.set_default_timeout(WAIT_LIMIT_MS)
    record_csp_violations(context, violations)
    page = context.new_page()
    answer = page.goto(f"{site_url}{path}", wait_until="networkidle")
    assert "script-src 'self';" in answer.headers["content-security-policy"]
    assert violations == []
    # Injected scripts do not run, and the violation is reported.
    page.evaluate(
        "document.body.append(Object.assign(document.createElement('script'), { textContent: 'window.ran = true' }))"
    )
    assert page.evaluate("window.ran") is None
    context.close()
    assert len(violations) == 1
