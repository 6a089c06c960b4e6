"""Which uid the commands of a shop get on a node."""

from __future__ import annotations

from pathlib import Path

import pytest
from pytest_django import Settings

from rpa_tasks import shop_uids

FIRST, LAST = 1000, 1004


@pytest.fixture(autouse=True)
def _state(settings: Settings, tmp_path: Path) -> None:
    settings.AFTERTOUCH_STATE_DIR = tmp_path
    settings.AFTERTOUCH_RPA_UIDS = (FIRST, LAST)
    (tmp_path / "rpa").mkdir()


def test_uid_of_shops_is_unique_and_stable() -> None:
    profiles = [f"pdd-s{number}" for number in range(LAST - FIRST)]
    given = {profile: shop_uids.uid_of(profile) for profile in profiles}
    assert sorted(given.values()) == list(range(FIRST, LAST))
    assert {profile: shop_uids.uid_of(profile) for profile in reversed(profiles)} == given
    assert shop_uids.directories_by_uid() == {uid: profile for profile, uid in given.items()}


def test_uid_of_full_range_raises() -> None:
    for number in range(LAST - FIRST):
        shop_uids.uid_of(f"pdd-s{number}")
    with pytest.raises(OSError, match="AFTERTOUCH_RPA_UIDS: all 4 are taken"):
        shop_uids.uid_of("pdd-s9")


def test_uid_of_outside_changed_range_is_replaced(settings: Settings) -> None:
    before = shop_uids.uid_of("pdd-s1")
    settings.AFTERTOUCH_RPA_UIDS = (LAST, LAST + 2)
    assert before < LAST <= shop_uids.uid_of("pdd-s1") < LAST + 2
