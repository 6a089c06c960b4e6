"""Find what a migration must not do while programs of the previous version run.

They insert rows without the new columns, name the columns and tables they know, rely on constraints for `ON CONFLICT`,
and must not wait while a big table is scanned or rewritten. Everything not known to be harmless is reported.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from django.contrib.postgres.operations import AddIndexConcurrently
from django.db.migrations import Migration, operations
from django.db.migrations.loader import MigrationLoader
from django.db.migrations.operations.base import Operation
from django.db.migrations.state import ProjectState
from django.db.models import NOT_PROVIDED, Field, ManyToManyField, Value
from django.db.models.functions import Now

HARMLESS = (
    operations.CreateModel,
    operations.AlterModelOptions,
    operations.AlterModelManagers,
    operations.AlterModelTableComment,
    AddIndexConcurrently,
)
BESIDE_TRAFFIC = re.compile(r"(CREATE( UNIQUE)?|DROP) INDEX CONCURRENTLY ", re.IGNORECASE)
#: Takes SHARE UPDATE EXCLUSIVE for a moment: readers and writers go on.
STORAGE = re.compile(r"ALTER TABLE \w+ SET \((\s*(fillfactor|autovacuum_\w+) = [\d.]+,?)+\)", re.IGNORECASE)
#: The first statement of an atomic migration: clients of a table wait behind a migration that waits for its lock.
#: PostgreSQL ends an autovacuum that stands in the way after a second (`deadlock_timeout`).
LOCK_TIMEOUT = "SET LOCAL lock_timeout = '2s'"
#: What of a field is no matter of the database, besides what Django lists.
IN_PYTHON = {"default", "auto_now", "auto_now_add"}


def list_later_migrations(base: dict[str, str]) -> Iterator[tuple[Migration, ProjectState]]:
    """Return every migration that no base contains, with the state before it."""
    loader = MigrationLoader(None, ignore_no_migrations=True)
    known = {node for leaf in base.items() for node in loader.graph.forwards_plan(leaf)}
    plan = [node for leaf in sorted(loader.graph.leaf_nodes()) for node in loader.graph.forwards_plan(leaf)]
    state = ProjectState(real_apps=loader.unmigrated_apps)
    for node in dict.fromkeys(plan):
        migration = loader.graph.nodes[node]
        if node not in known:
            yield migration, state.clone()
        migration.mutate_state(state, preserve=False)


def list_objections(migration: Migration, state: ProjectState) -> Iterator[tuple[str, str]]:
    """The name of each operation that is not harmless, and why. `state` is moved on."""
    app, made = migration.app_label, set()
    if migration.atomic and not _limits_lock_waits(migration.operations[0]):
        yield f"{app}.{migration.name}", f'clients wait behind its locks: RunSQL("{LOCK_TIMEOUT}", "") comes first'
    for operation in migration.operations:
        for step in getattr(operation, "database_operations", [operation]):
            if isinstance(step, operations.CreateModel):
                made.add(step.name_lower)
            elif getattr(step, "model_name_lower", None) not in made:
                why = "; ".join(_objections(step, migration, state))
                if why:
                    yield f"{app}.{migration.name}: {name_operation(step)}", why
        operation.state_forwards(app, state)


def name_operation(step: Operation) -> str:
    words = [type(step).__name__, getattr(step, "model_name", "") or getattr(step, "name", "")]
    part = getattr(step, "constraint", None) or getattr(step, "index", None) or step
    return " ".join([*words, str(getattr(part, "name", ""))]).strip() if words[1] else words[0]


def _objections(step: Operation, migration: Migration, state: ProjectState) -> Iterator[str]:
    if isinstance(step, HARMLESS):
        return
    if isinstance(step, operations.AddField):
        yield from _new_field_objections(step.field)
    elif isinstance(step, operations.AlterField):
        before = state.models[migration.app_label, step.model_name_lower].fields[step.name]
        yield from _altered_field_objections(before, step.field)
    elif isinstance(step, operations.AddIndex):
        yield "all who write wait for the index: AddIndexConcurrently, in a migration with atomic = False"
    elif not (_limits_lock_waits(step) or _sets_storage(step) or _makes_indexes(step, migration)):
        yield "not known to be harmless to programs of the version before"


def _new_field_objections(field: Field[Any, Any]) -> Iterator[str]:
    if isinstance(field, ManyToManyField):
        return  # a table of its own
    default = field.db_default
    if not field.null and default is NOT_PROVIDED:
        yield "old programs insert rows without it: null=True or a db_default"
    if (hasattr(default, "resolve_expression") and not isinstance(default, (Value, Now))) or field.generated:
        yield "a value for each row is computed while all wait"
    if field.db_index or field.unique:
        yield "all who write wait for its index: db_index=False, and AddIndexConcurrently"
    if field.remote_field and field.db_constraint:
        yield "all who write wait until its rows are compared: db_constraint=False"


def _altered_field_objections(before: Field[Any, Any], after: Field[Any, Any]) -> Iterator[str]:
    old, new = _database_options(before), _database_options(after)
    for name in sorted(key for key in old.keys() | new.keys() if old.get(key) != new.get(key)):
        longer = name == "max_length" and (new.get(name) or float("inf")) > (old.get(name) or float("inf"))
        eased = (name == "db_constraint" and new.get(name) is False) or (name == "db_default" and name in new)
        if not (longer or eased):
            yield f"{name} was {old.get(name)} and becomes {new.get(name)}: programs of both kinds read and write it"


def _database_options(field: Field[Any, Any]) -> dict[str, Any]:
    _, path, _, options = field.deconstruct()
    no_matter = {*field.non_db_attrs, *IN_PYTHON}
    return {"kind": path, **{key: value for key, value in options.items() if key not in no_matter}}


def _limits_lock_waits(step: Operation) -> bool:
    return _statements(step) == [LOCK_TIMEOUT]


def _makes_indexes(step: Operation, migration: Migration) -> bool:
    statements = _statements(step)
    return bool(statements) and not migration.atomic and all(BESIDE_TRAFFIC.match(each) for each in statements)


def _sets_storage(step: Operation) -> bool:
    statements = _statements(step)
    return bool(statements) and all(STORAGE.fullmatch(each) for each in statements)


def _statements(step: Operation) -> list[str]:
    if not isinstance(step, operations.RunSQL):
        return []
    parts = step.sql if isinstance(step.sql, list | tuple) else [step.sql]
    return [each.strip() for each in ";".join(str(each) for each in parts).split(";") if each.strip()]
