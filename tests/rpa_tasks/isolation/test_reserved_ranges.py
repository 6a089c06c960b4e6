"""Ranges of ports and uids that the machine uses for something else are named before a flow runs."""

from __future__ import annotations

import grp
import os
import pwd
from pathlib import Path

import pytest
from pytest_django import Settings

from rpa_tasks import checks, isolation, shop_uids

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="only root can give commands a uid of their own")


@pytest.fixture(autouse=True)
def by_uid(settings: Settings) -> None:
    settings.AFTERTOUCH_RPA_ISOLATION = isolation.UID
    settings.AFTERTOUCH_ROLE = "execution"


def run_isolation_checks() -> list[tuple[str | None, str]]:
    return [(each.id, each.msg) for each in checks.check_isolation()]


@pytest.mark.parametrize(
    ("ports", "warned"), [("below", False), ("first", True), ("last", True), ("around", True), ("above", False)]
)
def test_check_warns_of_ports_that_overlap_browser_ports(ports: str, warned: bool, settings: Settings) -> None:
    if not isolation.limits_ports():
        pytest.skip("this kernel has no Landlock rules for ports (Linux 6.7)")
    first, last = map(int, Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split())
    settings.AFTERTOUCH_RPA_PORTS = {
        "below": [(1, first - 1)], "first": [(443, 443), (1, first)], "last": [(last, 65_535)], "around": [(1, 65_535)],
        "above": [(last + 1, 65_535)],
    }[ports]  # fmt: skip
    if warned:
        ((id, message),) = run_isolation_checks()
        assert (id, "AFTERTOUCH_RPA_PORTS" in message, f"{first}-{last}" in message) == ("rpa_tasks.W004", True, True)
    else:
        assert run_isolation_checks() == []


@pytest.mark.parametrize("kind", ["uid", "gid"])
def test_check_refuses_uids_of_accounts(kind: str, settings: Settings) -> None:
    account = next(each for each in pwd.getpwall() if 0 < each.pw_uid < 60_000)
    group = next(each for each in grp.getgrall() if 0 < each.gr_gid < 60_000)
    number, name = (account.pw_uid, account.pw_name) if kind == "uid" else (group.gr_gid, group.gr_name)
    settings.AFTERTOUCH_RPA_UIDS = (number, number + 1)

    ((id, message),) = run_isolation_checks()

    assert (id, f"AFTERTOUCH_RPA_UIDS={number}-{number + 1}" in message) == ("rpa_tasks.E002", True)
    assert name in message
    with pytest.raises(isolation.CannotIsolate):
        isolation.mode()


@pytest.mark.parametrize(
    ("line", "warned"),
    [
        ("ann:600000:100000", False),
        ("ann:600000:100001", True),
        ("ann:799999:1", True),
        ("ann:800000:65536", False),
        ("ann:1:4294967294", True),
        ("# nothing", False),
    ],
)
def test_check_warns_of_overlapping_subordinate_uids(
    line: str, warned: bool, settings: Settings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings.AFTERTOUCH_RPA_UIDS = (700_000, 799_999)
    (tmp_path / "subuid").write_text(f"{line}\n")
    monkeypatch.setattr(shop_uids, "SUBORDINATE", (str(tmp_path / "subuid"), str(tmp_path / "missing")))
    if warned:
        ((id, message),) = run_isolation_checks()
        assert (id, "AFTERTOUCH_RPA_UIDS" in message, line in message) == ("rpa_tasks.W005", True, True)
    else:
        assert run_isolation_checks() == []
