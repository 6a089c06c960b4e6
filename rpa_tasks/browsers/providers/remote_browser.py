"""Attach a browser that the company runs elsewhere, and choose the provider of a shop's browser.

A forwarder on a port of the loopback leads to its DevTools address. So flows, evidence, health checks and take-over use
it like a browser of the pool. It is never ended, only detached.
"""

from __future__ import annotations

from typing import Protocol

from rpa_tasks.browsers import chromium, devtools, registry
from rpa_tasks.browsers.browser_errors import BROWSER_FAILED, NoBrowser
from rpa_tasks.browsers.browser_processes import leftover_browsers_on
from rpa_tasks.browsers.chromium import RunningBrowser
from rpa_tasks.browsers.providers.launch_settings import LaunchSettings
from rpa_tasks.browsers.providers.proxy import forward_to
from rpa_tasks.supervisor.processes import end_processes, read_process

ATTACH_TIMEOUT = 10.0  #: seconds for the first answer


class Provider(Protocol):
    """Provide the shop's browser on a port of the loopback.

    The caller has slot and profile, and its record names both. The process of the result leads a session, carries the
    slot's marker and names the profile on its command line. Raises `NoBrowser`.
    """

    def __call__(self, slot: int, profile_id: str, launch: LaunchSettings) -> RunningBrowser: ...


def choose_provider(launch: LaunchSettings) -> Provider:
    return attach_browser if launch.cdp_url else chromium.start_browser


def attach_browser(slot: int, profile_id: str, launch: LaunchSettings) -> RunningBrowser:
    """Attach the browser at `launch.cdp_url` and close the pages that are open there. See `Provider`."""
    profile = registry.profile_dir(profile_id)
    end_processes(lambda: leftover_browsers_on(str(profile)), grace=2.0)
    try:
        forwarding = forward_to(launch.cdp_url, {"kind": "plain"})
    except OSError as error:
        raise NoBrowser(BROWSER_FAILED, f"Browser {launch.cdp_url}: {error}") from error
    try:
        order = {"log": str(registry.browser_logs_dir() / f"browser-{slot}.log"), "profile": str(profile)}
        pid = chromium.spawn_session([], order, chromium.browser_environment(slot, profile), forwarding)
    finally:
        forwarding.listener.close()
    process = read_process(pid)
    try:
        path = devtools.websocket_path(forwarding.port, timeout=ATTACH_TIMEOUT)
        if process and devtools.reset_to_blank_page(forwarding.port):
            return RunningBrowser(pid, process.started, forwarding.port, path, remote=True)
    except devtools.NoAnswer as error:
        raise NoBrowser(BROWSER_FAILED, f"Browser {launch.cdp_url} does not answer: {error}") from error
    raise NoBrowser(BROWSER_FAILED, f"Browser {launch.cdp_url} has a page that does not close.")
