"""An upgrade while programs run: what a migration may do, and old and new ones side by side under load.

`django-migration-linter` judges the same by patterns over SQL. It says nothing of CHECK constraints and of constraints
that go, and misses a column that is NOT NULL where another one in the same migration has a default.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from django.contrib.postgres.operations import AddIndexConcurrently
from django.db import migrations, models
from django.db.migrations.loader import MigrationLoader
from django.db.models import Q
from django.db.models.functions import Now, Random

from config.environment import ROOT
from tests.deploy.additions import later_than, objections
from tests.deploy.earlier import Earlier, check_out
from tests.deploy.fleet import Fleet, Jobs, fleet
from tests.deploy.machine import UNITS
from tests.faults.house import Run, faults

#: What stood before there was anybody to upgrade, and what other packages bring along today.
FIRST = {
    "scheduling": "0002_triggers_and_storage",
    "rpa_tasks": "0001_initial",
    "chat_sessions": "0002_default_policy",
    "admin": "0003_logentry_add_action_flag_choices",
    "auth": "0012_alter_user_first_name_max_length",
    "contenttypes": "0002_remove_content_type_name",
    "django_celery_beat": "0019_alter_periodictasks_options",
    "sessions": "0001_initial",
}
#: By the name that the test gives an operation, why programs of the version before do not miss anything, or wait.
GRANTED: dict[str, str] = {
    "scheduling.0016_disabled_targets: RunSQL": "old programs learn of a disabled target at their next reload",
    "scheduling.0019_whole_subjects: AlterField attempt subject": "varchar becomes text without a rewrite",
}


def test_programs_of_the_version_before_a_migration_miss_nothing_after_it() -> None:
    found = {name: why for migration, before in later_than(FIRST) for name, why in objections(migration, before)}
    assert {name: why for name, why in found.items() if name not in GRANTED} == {}
    assert set(GRANTED) <= set(found), "granted, and nowhere done"


def test_there_are_migrations_to_judge() -> None:
    judged = {(migration.app_label, migration.name) for migration, _ in later_than(FIRST)}
    assert {("scheduling", "0003_unchecked_appends"), ("scheduling", "0005_ended")} <= judged
    assert not {app for app, _ in judged} - {"scheduling", "rpa_tasks", "chat_sessions"}


def why_not(*operations: Any, atomic: bool = True) -> str:
    """What is said against these operations after all that there are, under "scheduling"."""
    migration = migrations.Migration("9999_next", "scheduling")
    migration.operations, migration.atomic = list(operations), atomic
    return " | ".join(why for _, why in objections(migration, MigrationLoader(None).project_state()))


def added(field: Any) -> Any:
    return migrations.AddField("event", "shade", field)


def altered(name: str, field: Any) -> Any:
    return migrations.AlterField("event", name, field)


TABLE = migrations.CreateModel(
    "Shade", [("id", models.BigAutoField(primary_key=True)), ("tone", models.IntegerField())]
)
POSITIVE = models.CheckConstraint(condition=Q(tone__gt=0), name="shade_positive")
BY_TYPE = models.Index(fields=["type"], name="event_by_type")
UNKNOWN = "not known to be harmless"


@pytest.mark.parametrize(
    ("operation", "why"),
    [
        (added(models.IntegerField()), "insert rows without it"),
        (added(models.IntegerField(default=0)), "insert rows without it"),
        (added(models.FloatField(db_default=Random())), "computed while all wait"),
        (added(models.IntegerField(null=True, db_index=True)), "wait for its index"),
        (added(models.IntegerField(null=True, unique=True)), "wait for its index"),
        (
            added(models.ForeignKey("scheduling.Stage", models.CASCADE, null=True, db_index=False)),
            "until its rows are compared",
        ),
        (migrations.RemoveField("event", "trace_id"), UNKNOWN),
        (migrations.RenameField("event", "trace_id", "trace"), UNKNOWN),
        (migrations.RenameModel("Event", "Happening"), UNKNOWN),
        (migrations.DeleteModel("SavedFilter"), UNKNOWN),
        (migrations.AlterModelTable("event", "happenings"), UNKNOWN),
        (altered("trace_id", models.UUIDField(editable=False)), "null was True and becomes None"),
        (altered("trace_id", models.UUIDField(db_default="0" * 32)), "null was True and becomes None"),
        (altered("type", models.CharField(max_length=3)), "max_length was"),
        (altered("type", models.TextField()), "kind was"),
        (migrations.AddConstraint("event", models.CheckConstraint(condition=~Q(type=""), name="event_typed")), UNKNOWN),
        (migrations.RemoveConstraint("event", "event_once"), UNKNOWN),
        (migrations.AddIndex("event", BY_TYPE), "all who write wait"),
        (migrations.RemoveIndex("touch", "touch_ended"), UNKNOWN),
        (migrations.RunSQL("CREATE INDEX event_by_type ON scheduling_event (type)"), UNKNOWN),
        (migrations.RunSQL("CREATE INDEX CONCURRENTLY event_by_type ON scheduling_event (type)"), UNKNOWN),
        (migrations.RunPython(migrations.RunPython.noop), UNKNOWN),
        (migrations.SeparateDatabaseAndState([migrations.RemoveField("event", "trace_id")], []), UNKNOWN),
    ],
)  # fmt: skip
def test_what_they_would_miss_or_wait_for_is_objected_to(operation: Any, why: str) -> None:
    assert why in why_not(operation)


@pytest.mark.parametrize(
    "operation",
    [
        added(models.IntegerField(null=True)),
        added(models.IntegerField(db_default=0)),
        added(models.DateTimeField(db_default=Now())),
        added(models.ForeignKey("scheduling.Stage", models.CASCADE, null=True, db_index=False, db_constraint=False)),
        added(models.ManyToManyField("scheduling.Stage")),
        altered("trace_id", models.UUIDField("id of the trace", null=True, help_text="said otherwise")),
        altered("type", models.CharField(max_length=9_999)),
        migrations.AlterModelOptions("event", {"ordering": ["id"]}),
        migrations.SeparateDatabaseAndState([], [migrations.RemoveField("event", "trace_id")]),
    ],
)
def test_what_they_do_not_miss_is_not(operation: Any) -> None:
    assert why_not(operation) == ""


def test_a_table_that_is_made_in_the_same_migration_is_nobody_elses_yet() -> None:
    indexed = migrations.AddIndex("shade", models.Index(fields=["tone"], name="shade_tone"))
    assert why_not(TABLE, migrations.AddConstraint("shade", POSITIVE), indexed) == ""
    assert why_not(TABLE, migrations.AddConstraint("event", POSITIVE)).startswith(UNKNOWN)


def test_an_index_of_a_table_in_use_is_made_beside_traffic() -> None:
    sql = ["DROP INDEX CONCURRENTLY IF EXISTS a", "CREATE UNIQUE INDEX CONCURRENTLY a ON scheduling_event (type)"]
    assert why_not(AddIndexConcurrently("event", BY_TYPE), migrations.RunSQL(sql), atomic=False) == ""
    assert UNKNOWN in why_not(
        migrations.RunSQL([*sql, "DROP INDEX CONCURRENTLY a; DROP TABLE scheduling_event"]), atomic=False
    )


# --- under load ---------------------------------------------------------------------------------------------------

RATE = 4.0  #: events a second at each of the two doors


@pytest.mark.campaign
@pytest.mark.faults
def test_a_rolling_upgrade_under_load_and_back(
    state_folder: Callable[[str], Path], told: Callable[[str], None]
) -> None:
    """From the version before the newest migration. Events come in at both doors, jobs at the first one's."""
    earlier = check_out(state_folder("earlier") / "tree")
    with fleet(state_folder("fleet"), earlier.tree, ROOT) as both:
        both.settle_in()
        jobs = Jobs(both.old.base_url, both.api_key, both.folder / "effects")
        with faults(both.house(both.old), f"rolling upgrade from {earlier.commit} and back", RATE) as run, jobs:
            took, slowest = upgrade(both, run, earlier)
            take_back(both, run, earlier)
            run.go_on(10)
        problems = both.problems(jobs, earlier)
        told(
            f"{run.line()} · {len(jobs.accepted)} jobs · "
            f"migrated in {took:.1f} s, slowest 202 meanwhile in {slowest:.2f} s"
        )
    assert problems == []


def upgrade(both: Fleet, run: Run, earlier: Earlier) -> tuple[float, float]:
    """The tables first; then a new machine beside the old one, under either's beat; then the old one."""
    run.go_on(10)
    figures = both.migrate(run)
    both.new.start(*UNITS)
    with faults(both.house(both.new), "the new door", RATE):
        both.await_work_of_both()  # the old beat leads
        both.old.stop("beat")
        both.new.programs["beat"].await_log("beat_leads")
        both.await_work_of_both()
        run.strike()
        both.old.stop("web", "core", "execution")
        earlier.switch(earlier.today)
        both.old.start("web")
    return figures


def take_back(both: Fleet, run: Run, earlier: Earlier) -> None:
    """The old version again, on tables that it does not know."""
    run.strike()
    both.old.stop("web")
    earlier.switch(earlier.commit)
    both.old.start(*UNITS)
    both.await_work_of_both()
    both.new.stop(*UNITS)
    both.old.programs["beat"].await_log("beat_leads")
