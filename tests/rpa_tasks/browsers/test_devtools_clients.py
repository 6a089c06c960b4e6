"""Clients of DevTools that flows bring along, and the pages in the browser, which are none."""

from __future__ import annotations

import json
from collections.abc import Callable

from websockets.exceptions import InvalidStatus
from websockets.sync.client import connect
from websockets.typing import Origin

from rpa_tasks.browsers import devtools
from rpa_tasks.browsers.pool import AcquiredBrowser
from rpa_tasks.flow_sdk.flow import open_browser
from tests.rpa_tasks.browsers.browser_elsewhere import Elsewhere
from tests.rpa_tasks.browsers.conftest import Site
from tests.rpa_tasks.browsers.test_launch_settings import evaluate

Acquire = Callable[..., AcquiredBrowser]
OWN = ("http://127.0.0.1:{port}", "http://localhost:{port}")
FOREIGN = ("http://127.0.0.1:1", "http://shop.example", "https://127.0.0.1:{port}", "null")
#: A page has an origin of its own, whatever it asks for.
ATTEMPT = """new Promise(done => {
    const socket = new WebSocket("%s");
    socket.onopen = () => done("open");
    socket.onerror = () => done("refused");
})"""


def connects(port: int, origin: str | None) -> bool:
    """Ask the browser for its version, as websocket-client and others do: with the address that they connect to."""
    url = f"ws://127.0.0.1:{port}{devtools.websocket_path(port)}"
    try:
        with connect(url, origin=Origin(origin) if origin else None, proxy=None) as socket:
            socket.send(json.dumps({"id": 1, "method": "Browser.getVersion"}))
            return "product" in json.loads(socket.recv(timeout=30))["result"]
    except InvalidStatus as refusal:
        return refusal.response.status_code != 403


def find_accepted(port: int) -> list[str]:
    return [each for each in (*OWN, *FOREIGN) if connects(port, each.format(port=port))]


def test_client_with_the_origin_of_its_address_connects_and_no_page(acquire: Acquire, site: Site) -> None:
    browser = acquire("s1")
    assert connects(browser.port, None)
    assert find_accepted(browser.port) == list(OWN)

    address = f"127.0.0.1:{browser.port}{devtools.websocket_path(browser.port)}"
    for page in (f"{site.url}/orders", f"{site.url}/orders".replace("127.0.0.1", "localhost")):
        for host in (address, address.replace("127.0.0.1", "localhost")):
            assert evaluate(browser.port, page, ATTEMPT % f"ws://{host}") == "refused", page


def test_client_of_a_trial_connects_alike() -> None:
    with open_browser() as port:
        assert find_accepted(port) == list(OWN)


def test_client_of_a_browser_elsewhere_connects_alike(acquire: Acquire, elsewhere: Elsewhere) -> None:
    """The forwarder removes its own address, which the browser cannot know."""
    browser = acquire("s1", launch=elsewhere.launch)
    assert connects(browser.port, None)
    assert find_accepted(browser.port) == list(OWN)
