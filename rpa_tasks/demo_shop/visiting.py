"""Visit the demo marketplace from a flow, and translate its errors."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rpa_tasks.flow_sdk import BusinessError, Flow, PlatformError, SessionExpired, Transient

if TYPE_CHECKING:
    from playwright.sync_api import Page, Response

TURNED_AWAY = 429
BROKEN = 500


def visit(flow: Flow, path: str) -> Page:
    """Open a page of this shop; log in first if the payload has `"login": true`.

    Raises: `SessionExpired`, `PlatformError`, `Transient`, `BusinessError`.
    """
    site = flow.text("site").rstrip("/")
    if not site.startswith(("http://", "https://")):
        raise BusinessError("payload: site must begin with http:// or https://")
    look_at(flow.page.goto(f"{site}{path}"))
    if not is_inside(flow):
        if flow.payload.get("login") is not True:
            raise SessionExpired(f"{flow.shop_id} is not logged in to {site}.")
        _log_in(flow, site)
        look_at(flow.page.goto(f"{site}{path}"))
        if not is_inside(flow):
            raise SessionExpired(f"{flow.shop_id} could not be logged in to {site}.")
    return flow.page


def look_at(response: Response | None) -> None:
    """Raise `PlatformError` or `Transient` if the response is not the page."""
    if response is None:
        return
    if response.status == TURNED_AWAY:
        raise PlatformError("The site takes us for a robot.")
    if response.status >= BROKEN:
        raise Transient(f"The site answered {response.status}.")


def is_inside(flow: Flow) -> bool:
    """Return whether the page is logged in as this shop. Orders of another shop must not be stored under this one."""
    shown = flow.page.locator("[data-shop]")
    return shown.count() == 1 and shown.get_attribute("data-shop") == flow.shop_id


def _log_in(flow: Flow, site: str) -> None:
    page = flow.page
    look_at(page.goto(f"{site}/login"))
    page.get_by_label("Shop").fill(flow.shop_id)
    with page.expect_navigation() as navigation:
        page.get_by_role("button", name="Log in").click()
    look_at(navigation.value)
