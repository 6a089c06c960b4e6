"""A picture of the page that a run has left."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from rpa_tasks.browsers import devtools
from rpa_tasks.browsers.pool import AcquiredBrowser
from tests.rpa_tasks.browsers.browser_processes import visit
from tests.rpa_tasks.browsers.conftest import Site
from tests.support.waiting import WAIT_LIMIT

LIMIT = 1_000_000
Acquire = Callable[..., AcquiredBrowser]


def look(port: int) -> devtools.Snapshot:
    return devtools.take_snapshot(port, timeout=WAIT_LIMIT, limit=LIMIT)


def test_snapshot_shows_latest_page_of_the_run(acquire: Acquire, site: Site) -> None:
    borrowed = acquire("s1")
    for page in ("goods", "orders"):
        visit(borrowed.port, f"{site.url}/{page}", site)
    found = look(borrowed.port)

    assert "<title>/orders</title>" in found.html
    assert "订单" in found.html
    assert found.screenshot.startswith(b"\x89PNG")
    assert devtools.websocket_path(borrowed.port)  # looking does not end it


def evaluate(port: int, expression: str) -> None:
    devtools.send_command(
        port, f"/devtools/page/{devtools.list_tabs(port)[0].id}", "Runtime.evaluate", expression=expression,
        timeout=WAIT_LIMIT,
    )  # fmt: skip


def test_snapshot_is_limited_in_size_and_time(acquire: Acquire, site: Site) -> None:
    """Also if the page replaces what limits its HTML, or hangs."""
    borrowed = acquire("s1")
    visit(borrowed.port, f"{site.url}/orders", site)
    noise = (
        "String.prototype.slice = function () { return this };"
        "document.body.innerHTML = '<canvas id=c width=1366 height=900></canvas>';"
        "const x=c.getContext('2d'),d=x.createImageData(1366,900);"
        "for(let i=0;i<d.data.length;i++)d.data[i]=i%4==3?255:Math.random()*256;x.putImageData(d,0,0);"
        "document.body.append('x'.repeat(2000000))"
    )
    evaluate(borrowed.port, noise)
    found = look(borrowed.port)

    assert found.screenshot.startswith(b"\xff\xd8")  # a JPEG, as the PNG was larger
    assert len(found.screenshot) <= LIMIT
    assert len(found.html) == LIMIT

    visit(borrowed.port, f"{site.url}/goods", site)
    evaluate(borrowed.port, "setTimeout(() => { for (;;); }, 0)")
    with pytest.raises(devtools.NoAnswer):
        devtools.take_snapshot(borrowed.port, timeout=2.0, limit=LIMIT)
    borrowed.release(dirty=True)
    with pytest.raises(devtools.NoAnswer):
        look(borrowed.port)
