"""A configuration file is stored as a whole or not at all."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from django.db import IntegrityError, connection

from config.local.processes import wait_until
from scheduling.models import ChannelConfig, Node, Stage, Template
from tests.scheduling.config_file.conftest import BASE_CONFIG
from tests.scheduling.core.conftest import held_by_second_connection
from tests.scheduling.core.programs import is_connected, program, waits_for_a_lock

NAME = "apply-config-to-kill"
APPLY = f"""
import sys
import django
django.setup()
from django.core.management import call_command
from django.db import connection
with connection.cursor() as cursor:
    cursor.execute("SET application_name = '{NAME}'")
call_command("apply_config", sys.argv[1])
"""


def count_rows() -> list[int]:
    return [model.objects.count() for model in (ChannelConfig, Template, Stage, Node)]


def execute(statement: str) -> None:
    with connection.cursor() as cursor:
        cursor.execute(statement)


@pytest.mark.django_db
def test_apply_config_failing_late_stores_nothing(apply: Callable[..., str]) -> None:
    execute("ALTER TABLE scheduling_historicalnode ADD CONSTRAINT refused CHECK (key <> 'presale-download')")

    with pytest.raises(IntegrityError, match="refused"):
        apply(BASE_CONFIG)

    assert count_rows() == [0, 0, 0, 0]


@pytest.mark.django_db(transaction=True)
def test_apply_config_killed_late_stores_nothing(apply: Callable[..., str], tmp_path: Path) -> None:
    """The sections before are written; the node's history waits for the lock when the process is killed."""
    file = tmp_path / "killed.yaml"
    file.write_text(BASE_CONFIG, encoding="utf-8")

    with (
        held_by_second_connection(lambda: execute("LOCK TABLE scheduling_historicalnode IN SHARE MODE"), commit=False),
        program(APPLY, str(file)) as process,
    ):
        assert wait_until(lambda: waits_for_a_lock(NAME), 60)
        process.kill()
        process.wait(60)
    assert wait_until(lambda: not is_connected(NAME), 60)

    assert count_rows() == [0, 0, 0, 0]
    assert "applied" in apply(BASE_CONFIG)
    assert count_rows() == [1, 1, 1, 1]
