"""Parameters and tools of a run."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from rpa_tasks.flow_sdk.browser import Tab
from rpa_tasks.flow_sdk.errors import BusinessError, Misused
from rpa_tasks.flow_sdk.messages import Wire

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

#: By name: accepted types, their description, and the default.
PARAM_FIELDS: Mapping[str, tuple[type | tuple[type, ...], str, Any]] = {
    "shop_id": (str, "a string", None),
    "platform": (str, "a string", ""),
    "profile_id": (str, "a string", ""),
    "task_id": (str, "a string", ""),
    "delivery_key": (str, "a string", ""),
    "lease_no": (int, "a whole number", 0),
    "debug_port": ((int, type(None)), "a port number or null", None),
    "payload": (dict, "an object", {}),
}
HIGHEST_PORT = 65_535


@dataclass(slots=True, kw_only=True)
class Flow:
    """One run. `page` is a new tab in the shop's own browser, with the shop's logins."""

    shop_id: str
    platform: str
    profile_id: str
    #: The job. Constant over its retries.
    task_id: str
    #: The same for a job and for every job that was published again in its place: an idempotency key.
    delivery_key: str
    #: Increased by each run of the shop. Store it with your data, and refuse to overwrite data with a higher one.
    lease_no: int
    payload: dict[str, Any]
    #: Seconds.
    timeout: float
    tab: Tab
    wire: Wire

    @property
    def page(self) -> Page:
        """Return the tab. Raises `Misused` if the job has no browser, `Transient` if the browser does not answer."""
        return self.tab.page

    @property
    def browser(self) -> Browser:
        """Return the shop's browser; its only context has the shop's cookies. Raises like `page`."""
        return self.tab.browser

    def text(self, name: str) -> str:
        """Return a required text of the payload. Raises `BusinessError` if it is missing or empty."""
        value = self.payload.get(name)
        if not isinstance(value, str) or not value.strip():
            raise BusinessError(f"payload: {name} must be a text that is not empty.")
        return value

    def progress(self, fraction: float, message: str = "") -> None:
        """Report the progress, between 0 and 1, which is shown with the job."""
        self.wire.progress(fraction, message)


def read_param(text: str) -> dict[str, Any]:
    """Return the fields of `--param`, checked for their types.

    Without a member `payload` all unknown members are the payload: both styles of `Flow.param_style` are accepted.

    Raises: `Misused`. The message contains no value, as a payload may be secret.
    """
    try:
        given = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise Misused(f"--param is not JSON: {error}") from None
    if not isinstance(given, dict):
        raise Misused("--param must be a JSON object.")
    if "payload" not in given:
        given["payload"] = {name: value for name, value in given.items() if name not in PARAM_FIELDS}
    read = {name: _checked_field(given, name) for name in PARAM_FIELDS}
    if read["debug_port"] is not None and not 0 < read["debug_port"] <= HIGHEST_PORT:
        raise Misused("--param: debug_port must be between 1 and 65535.")
    return read


def _checked_field(given: Mapping[str, Any], name: str) -> Any:
    fitting, wanted, otherwise = PARAM_FIELDS[name]
    if name not in given:
        if name == "shop_id":
            raise Misused("--param: shop_id is missing.")
        return otherwise
    value = given[name]
    if not isinstance(value, fitting) or isinstance(value, bool):
        raise Misused(f"--param: {name} must be {wanted}.")
    return value
