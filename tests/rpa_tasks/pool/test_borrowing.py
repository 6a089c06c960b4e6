"""A shop borrows its browser, gives it back, and finds it again."""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from rpa_tasks.browsers import devtools, registry
from rpa_tasks.browsers.browser_errors import BROWSER_WAIT, PROFILE_BUSY, NoBrowser
from rpa_tasks.browsers.pool import AcquiredBrowser
from rpa_tasks.browsers.registry import Lock
from tests.rpa_tasks.pool.actors import BorrowerProcess, is_gone, record_of, states, visit

pytestmark = pytest.mark.browser
Lend = Callable[..., AcquiredBrowser]


def test_a_shop_finds_its_browser_warm(lend: Lend) -> None:
    first = lend("s1")
    first.release()
    second = lend("s1")

    assert (first.warm, second.warm) == (False, True)
    assert (first.pid, first.port) == (second.pid, second.port)
    assert devtools.websocket_path(second.port)


def test_who_has_it_is_on_record(lend: Lend) -> None:
    borrowed = lend("s1", lease_no=7)
    record = record_of("s1")
    assert record is not None
    assert (record.state, record.shop, record.lease_no, record.pid) == ("busy", "shop/s1", 7, borrowed.pid)

    borrowed.release()
    record = record_of("s1")
    assert record is not None
    assert (record.state, record.uses, record.lease_no) == ("idle", 1, 0)


def test_two_shops_have_two_browsers(lend: Lend) -> None:
    one, other = lend("s1"), lend("s2")

    assert one.pid != other.pid
    assert one.port != other.port
    assert one.profile_dir != other.profile_dir


def test_giving_back_twice_does_not_take_it_from_the_next(lend: Lend) -> None:
    first = lend("s1")
    first.release()
    second = lend("s1")
    first.release(dirty=True)

    assert states() == {"s1": "busy"}
    assert devtools.websocket_path(second.port)


def test_a_dirty_browser_is_ended(lend: Lend) -> None:
    borrowed = lend("s1")
    borrowed.release(dirty=True)

    assert is_gone(borrowed.pid)
    assert states() == {}
    assert not lend("s1").warm


def test_an_exception_gives_back_dirty(lend: Lend) -> None:
    with pytest.raises(RuntimeError), lend("s1") as borrowed:
        raise RuntimeError
    assert is_gone(borrowed.pid)


def test_the_browser_used_longest_ago_makes_room(lend: Lend) -> None:
    pids = {}
    for shop in ("s1", "s2", "s3", "s1"):  # s2 is the one used longest ago
        borrowed = lend(shop)
        pids[shop] = borrowed.pid
        borrowed.release()

    newcomer = lend("s4")

    assert states() == {"s1": "idle", "s3": "idle", "s4": "busy"}
    assert is_gone(pids["s2"])
    assert newcomer.slot == 2
    assert [lend(shop).warm for shop in ("s1", "s3")] == [True, True]


def test_a_busy_browser_is_never_evicted(lend: Lend, settings: Any) -> None:
    settings.AFTERTOUCH_RPA_BROWSERS = 1
    borrowed = lend("s1")

    began = time.monotonic()
    with pytest.raises(NoBrowser) as refused:
        lend("s2", wait=0.5)

    assert refused.value.reason == BROWSER_WAIT
    assert 0.5 <= time.monotonic() - began < 20
    assert devtools.websocket_path(borrowed.port)
    assert states() == {"s1": "busy"}


def test_who_waits_gets_the_slot_that_is_given_back(lend: Lend, borrower: Callable[..., Any], settings: Any) -> None:
    settings.AFTERTOUCH_RPA_BROWSERS = 1
    mine = lend("s1")
    other: BorrowerProcess = borrower("s2", "60", AFTERTOUCH_RPA_BROWSERS="1")
    mine.release()

    assert other.hear()["slot"] == 1
    assert states() == {"s2": "busy"}
    assert is_gone(mine.pid)


def test_the_wait_is_told(lend: Lend) -> None:
    assert timedelta(0) < lend("s1").waited < timedelta(seconds=30)


def test_one_profile_is_never_lent_twice(lend: Lend, borrower: Callable[..., Any]) -> None:
    lend("s1")
    other: BorrowerProcess = borrower("s1", "0.3")

    assert other.hear()["reason"] == PROFILE_BUSY


def test_nothing_is_started_for_a_request_that_is_nearly_over(
    lend: Lend, settings: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The slot becomes free at a moment when a start could not be over in time."""
    settings.AFTERTOUCH_RPA_BROWSERS = 1
    holder = Lock(Path(settings.AFTERTOUCH_STATE_DIR) / "rpa" / "browsers" / "slot-1.lock")
    lend("s1").release()
    assert holder.try_acquire()
    looks = []

    def late(_: float) -> None:
        looks.append(1)
        holder.release()

    monkeypatch.setattr("rpa_tasks.browsers.pool.time.sleep", late)
    with pytest.raises(NoBrowser) as refused:
        lend("s2", wait=0.2)

    assert refused.value.reason == BROWSER_WAIT
    assert looks
    assert states() == {"s1": "idle"}


@pytest.mark.parametrize(
    ("setting", "value"),
    [
        ("AFTERTOUCH_RPA_BROWSER_USES", 2),
        ("AFTERTOUCH_RPA_BROWSER_AGE", timedelta(0)),
        ("AFTERTOUCH_RPA_BROWSER_MEMORY_MB", 1),
    ],
)
def test_a_worn_browser_is_replaced(lend: Lend, settings: Any, setting: str, value: Any) -> None:
    first = lend("s1")
    first.release()
    second = lend("s1")
    assert second.pid == first.pid
    setattr(settings, setting, value)
    second.release()

    assert is_gone(first.pid)
    assert lend("s1").pid != first.pid


def test_pages_that_a_run_left_open_are_closed(lend: Lend, site: Any) -> None:
    borrowed = lend("s1")
    visit(borrowed.port, f"{site.url}/orders", site)
    visit(borrowed.port, f"{site.url}/goods", site)
    assert len(devtools.list_tabs(borrowed.port)) == 3
    borrowed.release()

    again = lend("s1")
    assert again.warm
    assert [page["url"] for page in devtools.list_tabs(again.port)] == ["about:blank"]


def test_a_slot_that_the_settings_took_away_is_not_used(lend: Lend, settings: Any) -> None:
    one, two = lend("s1"), lend("s2")
    one.release()
    two.release()
    settings.AFTERTOUCH_RPA_BROWSERS = 1

    assert lend("s3").slot == 1
    assert registry.read_record(2) is not None  # the maintainer's to end


@pytest.mark.parametrize("profile", ["店铺 1", "../escape", ".", "..", ".hidden", "a/b", "x" * 300])
def test_any_shop_id_makes_a_folder_of_its_own(state: Path, profile: str) -> None:
    from rpa_tasks.browsers import registry

    folder = registry.profile_dir(profile)
    assert folder.parent == state / "rpa" / "profiles"
    assert folder.is_dir()
    assert not folder.name.startswith(".")
    assert folder != registry.profile_dir(profile + "x")


def test_no_shop_id_is_refused(state: Path) -> None:
    from rpa_tasks.browsers import registry

    with pytest.raises(ValueError, match="needs an id"):
        registry.profile_dir("")
