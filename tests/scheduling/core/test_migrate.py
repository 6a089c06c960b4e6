"""A migration that needs a table in use lets others have it meanwhile."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import pytest
from django.core.management import call_command
from django.db import OperationalError, connection, transaction

from config.embedded.processes import wait_until
from scheduling.management.commands import migrate
from scheduling.models import AlertReceiver, ChannelConfig

PATIENCE = 60.0
BEFORE, NEWEST = "0009_guarded_rollouts", "0010_alerts"


@pytest.fixture
def taken_back(transactional_db: None) -> Iterator[None]:
    """The tables of alerts are not there, until the test has ended."""
    call_command("migrate", "scheduling", BEFORE, verbosity=0)
    try:
        yield
    finally:
        call_command("migrate", "scheduling", verbosity=0)


@pytest.fixture
def tries(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """How often it has met a table in use."""
    met: list[str] = []
    monkeypatch.setattr(migrate, "PAUSE", 0.05)
    monkeypatch.setattr(migrate, "LOCK_WITHIN", "100ms")
    monkeypatch.setattr(migrate.log, "warning", lambda event, **_: met.append(event))
    return met


def migrated(to: str = NEWEST) -> None:
    try:
        call_command("migrate", "scheduling", to, verbosity=0)
    finally:
        connection.close()


def write_to_channels() -> None:
    """Others may write too. A migration that refers to the table waits for the end of the transaction."""
    with connection.cursor() as cursor:
        cursor.execute("LOCK TABLE scheduling_channelconfig IN ROW EXCLUSIVE MODE")


def test_a_table_in_use_is_asked_for_again_and_kept_from_nobody(
    taken_back: None, tries: list[str], matrix: Any, elsewhere: Callable[[Callable[[], Any]], Any]
) -> None:
    with ThreadPoolExecutor(1) as pool:
        with transaction.atomic():
            write_to_channels()
            done: Future[None] = pool.submit(migrated)
            assert wait_until(lambda: bool(tries) or done.done(), PATIENCE)
            elsewhere(lambda: ChannelConfig.objects.create(key="beside", kind="log"))
            assert wait_until(lambda: len(tries) >= 3 or done.done(), PATIENCE)
        done.result(PATIENCE)
    assert set(tries) == {"migration_waits"}
    assert not AlertReceiver.objects.exists()  # the table is there


def test_it_gives_up_in_the_end_and_leaves_nothing_half_done(
    taken_back: None, tries: list[str], matrix: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(migrate, "TRIES", 2)
    with ThreadPoolExecutor(1) as pool, transaction.atomic():
        write_to_channels()
        with pytest.raises(OperationalError, match="lock timeout"):
            pool.submit(migrated).result(PATIENCE)
    assert tries == ["migration_waits"]
    with connection.cursor() as cursor:
        assert "scheduling_alert" not in connection.introspection.table_names(cursor)
