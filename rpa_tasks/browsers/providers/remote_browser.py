"""Attach a browser that the company runs elsewhere.

A forwarder on a port of the loopback leads to its DevTools address. So flows, evidence and take-over use it like
a browser of the pool. It is never ended, only detached.
"""

from __future__ import annotations

from dataclasses import replace

from rpa_tasks.browsers import chromium, devtools, registry
from rpa_tasks.browsers.browser_errors import BROWSER_FAILED, NoBrowser
from rpa_tasks.browsers.browser_processes import leftover_browsers_on
from rpa_tasks.browsers.providers.launch_settings import LaunchSettings
from rpa_tasks.browsers.providers.proxy import forward_to
from rpa_tasks.browsers.registry import Record
from rpa_tasks.supervisor.processes import end_processes, read_process

ATTACH_TIMEOUT = 10.0  #: seconds for the first answer


def attach_browser(record: Record, launch: LaunchSettings) -> Record:
    """Attach the browser at `launch.cdp_url` and close the pages that are open there. See `chromium.start_browser`.

    The process of the record is the forwarder. It leads a session, carries the slot's marker and names the profile.
    """
    profile = registry.profile_dir(record.profile)
    end_processes(lambda: leftover_browsers_on(str(profile)), grace=2.0)
    try:
        forwarding = forward_to(launch.cdp_url, {"kind": "plain"})
    except OSError as error:
        raise NoBrowser(BROWSER_FAILED, f"Browser {launch.cdp_url}: {error}") from error
    try:
        order = {"log": str(registry.browser_logs_dir() / f"browser-{record.slot}.log"), "profile": str(profile)}
        pid = chromium.spawn_session([], order, chromium.browser_environment(record), forwarding)
    finally:
        forwarding.listener.close()
    process = read_process(pid)
    try:
        path = devtools.websocket_path(forwarding.port, timeout=ATTACH_TIMEOUT)
        if process and devtools.reset_to_blank_page(forwarding.port):
            return replace(record, pid=pid, ticks=process.started, port=forwarding.port, path=path, remote=True)
    except devtools.NoAnswer as error:
        raise NoBrowser(BROWSER_FAILED, f"Browser {launch.cdp_url} does not answer: {error}") from error
    raise NoBrowser(BROWSER_FAILED, f"Browser {launch.cdp_url} has a page that does not close.")
