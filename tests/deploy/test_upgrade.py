"""An upgrade while programs run: what a migration may do, and old and new programs side by side under load.

`django-migration-linter` judges the same by patterns over SQL. It ignores CHECK constraints and dropped constraints,
and misses a column that is NOT NULL where another one in the same migration has a default.
"""

from concurrent.futures import ThreadPoolExecutor

import pytest
from django.contrib.postgres.operations import AddIndexConcurrently
from django.db import OperationalError, connection, migrations, models, transaction
from django.db.migrations.loader import MigrationLoader
from django.db.models import Q
from django.db.models.functions import Now, Random

from config.environment import ROOT
from config.local.processes import wait_until
from scheduling.sql import is_lock_timeout
from tests.deploy.additive_migrations import LOCK_TIMEOUT, list_later_migrations, list_objections
from tests.deploy.machine import UNITS
from tests.deploy.previous_version import check_out
from tests.deploy.two_machines import Jobs, run_two_machines
from tests.faults.fault_stack import faults
from tests.support.tables import each_row
from tests.support.waiting import WAIT_LIMIT

#: Migrations from before the first deployment, and those of other packages today.
FIRST = {
    "scheduling": "0001_initial",
    "rpa_tasks": "0001_initial",
    "chat_sessions": "0001_initial",
    "admin": "0003_logentry_add_action_flag_choices",
    "auth": "0012_alter_user_first_name_max_length",
    "contenttypes": "0002_remove_content_type_name",
    "django_celery_beat": "0019_alter_periodictasks_options",
    "sessions": "0001_initial",
}
#: By the name that the test gives an operation, why programs of the version before do not miss anything, or wait.
GRANTED = {}


def test_migrations_since_initial_raise_no_objections():
    found = {
        name: why
        for migration, before in list_later_migrations(FIRST)
        for name, why in list_objections(migration, before)
    }
    assert {name: why for name, why in found.items() if name not in GRANTED} == {}
    assert set(GRANTED) <= set(found), "granted, and nowhere done"


def test_later_than_yields_only_migrations_after_the_base():
    judged = [(each.app_label, each.name) for each, _ in list_later_migrations({**FIRST, "admin": "0001_initial"})]
    assert ("admin", "0002_logentry_remove_auto_add") in judged
    assert not {(app, name) for app, name in FIRST.items() if app != "admin"} & set(judged)


def next_migration(*operations, atomic=True):
    migration = migrations.Migration("9999_next", "scheduling")
    migration.operations, migration.atomic = list(operations), atomic
    return migration


def objections_to(*operations, atomic=True):
    """Return the objections to these operations after all that exist, under "scheduling"."""
    migration = next_migration(*([LIMIT] if atomic else []), *operations, atomic=atomic)
    return " | ".join(why for _, why in list_objections(migration, MigrationLoader(None).project_state()))


def added(field):
    return migrations.AddField("event", "shade", field)


def altered(name, field):
    return migrations.AlterField("event", name, field)


LIMIT = migrations.RunSQL(LOCK_TIMEOUT, migrations.RunSQL.noop)
TABLE = migrations.CreateModel(
    "Shade", [("id", models.BigAutoField(primary_key=True)), ("tone", models.IntegerField())]
)
POSITIVE = models.CheckConstraint(condition=Q(tone__gt=0), name="shade_positive")
BY_TYPE = models.Index(fields=["type"], name="event_by_type")
UNKNOWN = "not known to be harmless"


@each_row(
    "operation, why",
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
        (migrations.DeleteModel("Event"), UNKNOWN),
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
def test_objections_to_incompatible_operation_name_the_reason(operation, why):
    assert why in objections_to(operation)


@each_row(
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
def test_objections_to_compatible_operation_are_empty(operation):
    assert objections_to(operation) == ""


def test_objections_ignore_table_of_the_same_migration():
    indexed = migrations.AddIndex("shade", models.Index(fields=["tone"], name="shade_tone"))
    assert objections_to(TABLE, migrations.AddConstraint("shade", POSITIVE), indexed) == ""
    assert objections_to(TABLE, migrations.AddConstraint("event", POSITIVE)).startswith(UNKNOWN)


def test_objections_to_index_on_used_table_require_concurrently():
    sql = ["DROP INDEX CONCURRENTLY IF EXISTS a", "CREATE UNIQUE INDEX CONCURRENTLY a ON scheduling_event (type)"]
    assert objections_to(AddIndexConcurrently("event", BY_TYPE), migrations.RunSQL(sql), atomic=False) == ""
    assert UNKNOWN in objections_to(
        migrations.RunSQL([*sql, "DROP INDEX CONCURRENTLY a; DROP TABLE scheduling_event"]), atomic=False
    )


def test_objections_name_migration_without_lock_timeout():
    migration = next_migration(added(models.IntegerField(null=True)), LIMIT)
    assert [name for name, _ in list_objections(migration, MigrationLoader(None).project_state())] == [
        "scheduling.9999_next"
    ]


@pytest.mark.django_db(transaction=True)
def test_migration_of_locked_table_times_out_and_applies_later():
    migration = next_migration(LIMIT, added(models.IntegerField(null=True)))

    def apply():
        try:
            with connection.schema_editor() as editor:
                migration.apply(MigrationLoader(None).project_state(), editor)
        except OperationalError as error:
            if not is_lock_timeout(error):
                raise
            return False
        finally:
            connection.close()
        return True

    with ThreadPoolExecutor(1) as pool:
        with transaction.atomic(), connection.cursor() as cursor:
            cursor.execute("LOCK TABLE scheduling_event IN ROW EXCLUSIVE MODE")
            assert not pool.submit(apply).result(180)
        # Autovacuum may hold the table for longer than the migration waits.
        assert wait_until(lambda: pool.submit(apply).result(180), WAIT_LIMIT)
    with connection.cursor() as cursor:
        cursor.execute("ALTER TABLE scheduling_event DROP COLUMN shade")  # fails if it was not added


# --- under load ---------------------------------------------------------------------------------------------------

RATE = 4.0  #: events a second on each machine


@pytest.mark.campaign
def test_rolling_upgrade_and_rollback_under_load_lose_nothing(state_folder, report_line):
    """Upgrade from the version before the newest migration. Events arrive on both machines, jobs on the first."""
    earlier = check_out(state_folder("earlier") / "tree")
    with run_two_machines(state_folder("fleet"), earlier.tree, ROOT) as both:
        both.await_start()
        jobs = Jobs(both.old.base_url, both.api_key, both.folder / "effects")
        with faults(both.target_of(both.old), f"rolling upgrade from {earlier.commit} and back", RATE) as run, jobs:
            took, slowest = upgrade(both, run, earlier)
            downgrade(both, run, earlier)
            run.send_load(10)
        problems = both.problems(jobs)
        report_line(
            f"{run.line()} · {len(jobs.accepted)} jobs · "
            f"migrated in {took:.1f} s, slowest 202 meanwhile in {slowest:.2f} s"
        )
    assert problems == []


def upgrade(both, run, earlier):
    """The tables first; then a new machine beside the old one, under either's beat; then the old one."""
    run.send_load(10)
    figures = both.migrate(run)
    both.new.start(*UNITS)
    with faults(both.target_of(both.new), "the new version", RATE):
        both.await_work_of_both()  # the old beat leads
        both.old.stop("beat")
        both.new.programs["beat"].await_log("beat_leads")
        both.await_work_of_both()
        run.inject_fault()
        both.old.stop("web", "core", "ticks", "execution")
        earlier.switch(earlier.today)
        both.old.start("web")
    return figures


def downgrade(both, run, earlier):
    """The old version again, on tables that it does not know."""
    run.inject_fault()
    both.old.stop("web")
    earlier.switch(earlier.commit)
    both.old.start(*UNITS)
    both.await_work_of_both()
    both.new.stop(*UNITS)
    both.old.programs["beat"].await_log("beat_leads")
