"""Visit the demo marketplace from a flow, and translate its errors."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rpa_tasks.flow_sdk import BusinessError, Flow, PlatformError, SessionExpired, Transient

if TYPE_CHECKING:
    from playwright.sync_api import Page, Response

RATE_LIMITED_STATUS = 429
SERVER_ERROR_STATUS = 500


def visit(flow: Flow, path: str) -> Page:
    """Open a page of this shop; log in first if the payload has `"login": true`.

    Raises: `SessionExpired`, `PlatformError`, `Transient`, `BusinessError`.
    """
    site = flow.text("site").rstrip("/")
    if not site.startswith(("http://", "https://")):
        raise BusinessError("payload: site must start with http:// or https://")
    check_response(flow.page.goto(f"{site}{path}"))
    if not is_logged_in(flow):
        if flow.payload.get("login") is not True:
            raise SessionExpired(f"{flow.shop_id} is not logged in to {site}.")
        check_response(flow.page.goto(f"{site}/login"))
        flow.page.get_by_label("Shop").fill(flow.shop_id)
        with flow.page.expect_navigation() as navigation:
            flow.page.get_by_role("button", name="Log in").click()
        check_response(navigation.value)
        check_response(flow.page.goto(f"{site}{path}"))
        if not is_logged_in(flow):
            raise SessionExpired(f"{flow.shop_id} could not be logged in to {site}.")
    return flow.page


def check_response(response: Response | None) -> None:
    """Raise `PlatformError` or `Transient` if the response is not the page."""
    if response is None:
        return
    if response.status == RATE_LIMITED_STATUS:
        raise PlatformError("The site takes us for a robot.")
    if response.status >= SERVER_ERROR_STATUS:
        raise Transient(f"The site answered {response.status}.")


def is_logged_in(flow: Flow) -> bool:
    """Return whether the page is logged in as this shop. Orders of another shop must not be stored under this one."""
    shown = flow.page.locator("[data-shop]")
    return shown.count() == 1 and shown.get_attribute("data-shop") == flow.shop_id
