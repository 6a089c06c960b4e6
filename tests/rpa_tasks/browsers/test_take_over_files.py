"""Files between an operator and a page in a taken-over browser: a real browser, web process and Valkey."""

from __future__ import annotations

import base64
import hashlib
import os
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from django.db import OperationalError
from pytest_django import Settings

from rpa_tasks.browsers import registry
from rpa_tasks.models import Shop
from rpa_tasks.takeover import files, leases
from rpa_tasks.takeover.files import KeptFiles, delete_left_files, make_file_name
from rpa_tasks.takeover.wire import PART_LIMIT
from scheduling.models import AuditEntry
from tests.rpa_tasks.browsers.operator_page import REPORT, OperatorPage, Platform, create_operator
from tests.rpa_tasks.browsers.taking_over import Open, RunWithBrowser, control, open_take_over, start, wait_for_end
from tests.support.tables import each_row

pytestmark = pytest.mark.django_db(transaction=True)
BIG = os.urandom(100_000)  #: three parts


def open_files(page: OperatorPage, platform: Platform) -> None:
    control(page, platform)
    page.send("go", url=f"{platform.url}files")
    page.wait(lambda: any(tab["title"] == "商品" for tab in page.state["tabs"]), "no page")


def open_chooser(page: OperatorPage) -> int:
    """Click the button of the page that asks for files."""
    page.click(page.size[0] / 2, page.size[1] / 4)
    page.wait(lambda: page.state["files"]["chooser"], "no chooser is shown")
    return int(page.state["files"]["chooser"]["id"])


def send_part(page: OperatorPage, chooser: int, content: bytes, *, offset: int = 0, **fields: Any) -> None:
    part = content[offset : offset + PART_LIMIT]
    given = {"token": "t1", "number": 0, "of": 1, "name": "主图.png", "size": len(content)} | fields
    page.send("upload", chooser=chooser, offset=offset, data=base64.b64encode(part).decode(), **given)


def send_file(page: OperatorPage, chooser: int, content: bytes, **fields: Any) -> None:
    for offset in range(0, len(content) or 1, PART_LIMIT):
        send_part(page, chooser, content, offset=offset, **fields)


def describe(name: str, content: bytes) -> str:
    return f"/uploaded/{name}/{len(content)}/{hashlib.sha256(content).hexdigest()}"


def fetch(page: OperatorPage, download: str) -> bytes:
    content, size = b"", 1
    while len(content) < size:
        page.notices.clear()
        page.send("fetch", id=download, offset=len(content))
        page.wait(lambda: page.notices, "no part comes")
        assert page.notices[0]["type"] == "part", page.notices
        content += base64.b64decode(page.notices[0]["data"])
        size = page.notices[0]["size"]
    return content


def list_kept(shop: Shop) -> list[Path]:
    return [each for folder in registry.profile_dir(shop.profile).glob(".take-over-*") for each in folder.rglob("*")]


def read_audit() -> list[tuple[str, str, Any, Any]]:
    rows = AuditEntry.objects.filter(action="acted", kind="rpa_tasks.takeover").order_by("at", "pk")
    return [(row.actor, row.reason, *(change[2] for change in row.changes)) for row in rows]


@pytest.mark.usefixtures("host")
def test_page_gets_the_operators_files_once_all_are_there(shop: Shop, open_page: Open, platform: Platform) -> None:
    row, page = open_take_over(shop, open_page)
    open_files(page, platform)
    chooser = open_chooser(page)
    assert page.state["files"]["chooser"]["multiple"]
    send_part(page, chooser, BIG, of=2)
    page.wait(lambda: page.notices, "the part is not confirmed")
    send_part(page, chooser, BIG, of=2)  # the confirmation was lost
    send_part(page, chooser, BIG, of=2, offset=2 * PART_LIMIT)  # the part before was lost
    page.wait(lambda: len(page.notices) == 3, "the parts are not answered")
    assert [each["received"] for each in page.notices] == [PART_LIMIT] * 3
    [kept] = [each for each in list_kept(shop) if each.is_file()]
    assert stat.S_IMODE(kept.stat().st_mode) == 0o600
    send_file(page, chooser, BIG, of=2)
    send_file(page, chooser, b"", of=2, number=1, name="../../空.txt")
    page.wait(lambda: describe("空.txt", b"") in platform.noted, "the page does not get them")
    assert describe("主图.png", BIG) in platform.noted
    page.wait(lambda: page.state["files"]["chooser"] is None, "the chooser stays")
    recorded = ("ann", "file uploaded", "主图.png", "100000"), ("ann", "file uploaded", "空.txt", "0")
    assert [tuple(map(str, each)) for each in read_audit()] == list(recorded)
    leases.request_end(row, leases.TakeOverEnd.ENDED)
    assert wait_for_end(row) == "ended"
    assert list_kept(shop) == []


@pytest.mark.usefixtures("host")
def test_operator_gets_what_the_page_downloads(
    shop: Shop, open_page: Open, platform: Platform, read_log: Callable[[], str]
) -> None:
    ann, cookie = create_operator("ann")
    _, other = create_operator("ben")
    row = start(shop, ann)
    page, watcher = open_page(row, cookie), open_page(row, other, 1)
    open_files(page, platform)
    page.click(page.size[0] / 2, page.size[1] * 3 / 4)
    page.wait(lambda: [each["state"] for each in page.state["files"]["downloads"]] == ["done"], "it does not download")
    [found] = page.state["files"]["downloads"]
    content = REPORT.encode()
    assert (found["name"], found["size"]) == ("订单.csv", len(content))
    assert len(content) > files.OUTGOING_PART
    watcher.wait(lambda: watcher.state.get("files", {}).get("downloads"), "the other operator does not see it")
    watcher.send("fetch", id=found["id"], offset=0)
    assert fetch(page, found["id"]) == content
    page.send("fetched", id=found["id"])
    page.wait(lambda: not page.state["files"]["downloads"], "it stays")
    assert list_kept(shop) == []
    watcher.wait(lambda: not watcher.state["files"]["downloads"], "it stays")
    assert watcher.notices == [], "a part reaches an operator who only watches"
    assert [tuple(map(str, each)) for each in read_audit()] == [
        ("ann", "file downloaded", "订单.csv", str(len(content)))
    ]
    assert "1001" not in read_log()


@pytest.mark.usefixtures("host")
def test_file_beyond_the_limit_is_refused_before_its_bytes(
    shop: Shop, open_page: Open, platform: Platform, settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings.AFTERTOUCH_RPA_TAKEOVER_FILES_MB = 1
    _, page = open_take_over(shop, open_page)
    open_files(page, platform)
    chooser = open_chooser(page)
    for refused, fields in (
        ("too_large", {"size": 2**20 + 1}),
        ("chooser_gone", {"chooser": chooser + 1}),
        ("too_large", {"size": 5}),  # and sends more than it says
    ):
        page.notices.clear()
        send_part(page, fields.pop("chooser", chooser), b"x" * 10, **fields)
        page.wait(lambda: page.notices, "no answer comes")
        assert [each["problem"] for each in page.notices] == [refused]
    monkeypatch.setattr("tests.rpa_tasks.browsers.operator_page.REPORT", "x" * (2**20 + 1))
    page.click(page.size[0] / 2, page.size[1] * 3 / 4)
    page.wait(
        lambda: [each["state"] for each in page.state["files"]["downloads"]] == ["too_large"], "it is not refused"
    )
    page.notices.clear()
    page.send("fetch", id=page.state["files"]["downloads"][0]["id"], offset=0)
    page.wait(lambda: page.notices, "no answer comes")
    assert page.notices[0]["problem"] == "download_gone"
    page.send("no_upload", chooser=chooser)
    page.wait(lambda: page.state["files"]["chooser"] is None, "the chooser stays")
    assert [each for each in list_kept(shop) if each.is_file() and each.stat().st_size] == []
    assert read_audit() == []
    assert not [each for each in platform.noted if each.startswith("/uploaded")]


@pytest.mark.usefixtures("host")
def test_file_that_cannot_be_recorded_reaches_no_page(
    shop: Shop, open_page: Open, platform: Platform, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, page = open_take_over(shop, open_page)
    open_files(page, platform)
    chooser = open_chooser(page)

    record, failed = files.record_action, []

    def fail_once(*words: Any, **more: Any) -> None:
        if not failed:
            failed.append(True)
            raise OperationalError("no connection")
        record(*words, **more)

    monkeypatch.setattr(files, "record_action", fail_once)
    send_file(page, chooser, b"x")
    page.wait(lambda: "not_recorded" in [each.get("problem") for each in page.notices], "it is not refused")
    assert not [each for each in platform.noted if each.startswith("/uploaded")]
    send_file(page, chooser, b"x", token="t2")
    page.wait(lambda: describe("主图.png", b"x") in platform.noted, "the second attempt does not arrive")


@pytest.mark.usefixtures("host")
def test_downloads_of_a_shared_run_stay_its_own(
    shop: Shop, open_page: Open, platform: Platform, run: RunWithBrowser
) -> None:
    folder = registry.shop_runs_dir(shop.profile) / "run"
    run.browser.keep_downloads(folder)
    _, page = open_take_over(shop, open_page)
    open_files(page, platform)
    page.click(page.size[0] / 2, page.size[1] * 3 / 4)
    page.wait(lambda: list(folder.glob("*.csv")), "the run does not get its download")
    assert page.state["files"]["downloads"] == []
    send_file(page, open_chooser(page), b"x")
    page.wait(lambda: describe("主图.png", b"x") in platform.noted, "the file does not arrive")


def test_next_maintainer_deletes_files_that_a_killed_one_left(state: Path) -> None:
    kept = KeptFiles(registry.profile_dir("pdd-s1"), 7)
    killed = kept.opened()
    killed.__enter__()
    file = kept.create("a.txt", 100)
    file.append(b"secret")
    other = registry.profile_dir("pdd-s1") / "Default"
    other.mkdir()
    delete_left_files()
    assert not kept.folder.exists()
    assert other.exists()
    file.close()


def test_discarded_upload_frees_its_bytes_also_if_it_was_complete(state: Path) -> None:
    kept = KeptFiles(registry.profile_dir("pdd-s1"), 7)
    with kept.opened():
        file = kept.create("a.txt", 6)
        file.append(b"secret")
        assert file.is_complete
        file.discard()
        assert Path(file.path).stat().st_size == 0


def test_file_that_cannot_be_given_to_the_browser_leaves_no_descriptor(
    state: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: int) -> None:
        raise PermissionError

    give = os.fchown
    kept = KeptFiles(registry.profile_dir("pdd-s1"), 7)
    with kept.opened():
        before = os.listdir("/proc/self/fd")
        monkeypatch.setattr(os, "fchown", fail)
        with pytest.raises(PermissionError):
            kept.create("a.txt", 6)  # its folder fails
        monkeypatch.setattr(os, "fchown", lambda made, *owner: (fail if os.path.isfile(made) else give)(made, *owner))
        with pytest.raises(PermissionError):
            kept.create("a.txt", 6)
        assert os.listdir("/proc/self/fd") == before


def test_files_of_the_browser_are_read_without_links(state: Path, tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_text("x")
    kept = KeptFiles(registry.profile_dir("pdd-s1"), 7)
    with kept.opened():
        (kept.folder / "aa").symlink_to(secret)
        os.link(secret, kept.folder / "bb")
        os.mkfifo(kept.folder / "cc")
        (kept.folder / "dd").write_bytes(b"0123456789")
        for name in ("aa", "bb", "cc", "ee", "../Default", "/etc/passwd"):
            with pytest.raises(OSError):
                kept.read_download(name, 0, 10)
        assert kept.read_download("dd", 2, 3) == (b"234", 10)
    assert secret.read_text() == "x"


@each_row(
    "given, name",
    [
        ("主图.png", "主图.png"), ("../../etc/passwd", "passwd"), ("C:\\Users\\a\\b.xlsx", "b.xlsx"), ("", "file"),
        ("..", "file"), ("a\0b\n.txt", "ab.txt"), ("图" * 100 + ".png", "图" * 65 + ".png"), ("\ud800.txt", ".txt"),
    ],
)  # fmt: skip
def test_make_file_name_keeps_a_plain_name(given: str, name: str) -> None:
    assert make_file_name(given) == name
