"""What an app adds to this one: one `Integration` of each app, named in `settings.INTEGRATIONS`."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from functools import cache
from typing import TYPE_CHECKING, Any
from uuid import UUID

from django.conf import settings
from django.utils.module_loading import import_string

if TYPE_CHECKING:
    from django.db.models import Model
    from django.http import HttpRequest
    from django.utils.functional import Promise
    from prometheus_client.core import Metric

    from scheduling.admin.dashboard.charts import ActionLine, DashboardCard
    from scheduling.admin.navigation import Finder, Group
    from scheduling.db_timeouts import Deadline
    from scheduling.delivery.presence import Presence
    from scheduling.ledger.anonymization import Identity
    from scheduling.models import FailedTask
    from scheduling.monitoring.queues import WorkerReport
    from scheduling.operations.bulk_actions import RowAction
    from scheduling.operations.failed_tasks import Republisher
    from scheduling.operations.retention import RetentionTable
    from scheduling.operations.undo import Reversal


@dataclass(frozen=True, slots=True)
class FailedTaskOrigin:
    """Where failed tasks come from."""

    ledger: type[Model]
    republisher: Republisher
    panel: Callable[[HttpRequest, FailedTask], str] | None = None  #: HTML for the page of a failed task


@dataclass(frozen=True, slots=True)
class ScheduledRound:
    """A periodic task of operators whose rounds beat publishes itself."""

    #: Of args and kwargs. Raises `InvalidInput` that names each field.
    check: Callable[[Any, Any], object]
    #: Of schedule id, due instant, args and kwargs. Idempotent for the same instant.
    publish: Callable[[int, datetime, Any, Any], object]


@dataclass(frozen=True, slots=True)
class PersonalData:
    """A place of personal data outside a customer's events and touches. What is exported is also erased."""

    name: str  #: of its list in the export
    #: Of the identity, the delivery keys of the exported touches and the most entries. Return entries for JSON; None:
    #: its store does not answer.
    export: Callable[[Identity, Sequence[UUID], int], list[dict[str, Any]] | None]
    #: Of the identity, outside a transaction; or of the delivery keys of touches, inside one. Both return the number of
    #: rows, are idempotent, and may raise `scheduling.customers.erasure.ErasureDelayed`.
    erase: Callable[[Identity], int]
    erase_deliveries: Callable[[Sequence[UUID]], int] = lambda keys: 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Integration:
    failed_tasks: Mapping[str, FailedTaskOrigin] = field(default_factory=dict)  #: by origin
    reversals: Mapping[str, Reversal] = field(default_factory=dict)  #: by act
    row_actions: Mapping[str, RowAction] = field(default_factory=dict)  #: by name: `job.cancel`
    scheduled_rounds: Mapping[str, ScheduledRound] = field(default_factory=dict)  #: by task
    #: Labels of the app's codes, for pages that show rows of several apps; the second by the beginning of a code.
    reasons: Mapping[str, str | Promise] = field(default_factory=dict)
    reason_prefixes: Mapping[str, str] = field(default_factory=dict)
    presence: Sequence[Presence] = ()
    #: Tables whose old rows are deleted.
    retention: Sequence[RetentionTable] = ()
    personal_data: Sequence[PersonalData] = ()
    bootstrap: Sequence[Callable[[], str]] = ()  #: create the first rows and return a line to print; idempotent
    metrics: Sequence[
        Callable[[Deadline], Iterable[Metric]]
    ] = ()  #: read those of the cluster; any exception: no series
    #: By kind of process: measure the running and the wanted number.
    scaling: Mapping[str, Callable[[Deadline], tuple[int, int]]] = field(default_factory=dict)
    queues: Sequence[Callable[[], Iterable[str]]] = ()  #: name the undeclared queues of the app
    menu: Sequence[Group] = ()
    searches: Sequence[Finder] = ()
    cards: Sequence[Callable[[HttpRequest], DashboardCard | None]] = ()  #: of the overview; None: not for this user
    overview_actions: Sequence[Callable[[HttpRequest], Iterable[ActionLine]]] = ()
    worker_lists: Sequence[Callable[[], list[WorkerReport]]] = ()


def integrations() -> tuple[Integration, ...]:
    """Return the integrations in the order of the settings. The first call imports the apps' modules.

    Raises:
        ImportError: a path of the settings names nothing.
    """
    return load_integrations(tuple(settings.INTEGRATIONS))


@cache
def load_integrations(paths: tuple[str, ...]) -> tuple[Integration, ...]:
    return tuple(import_string(path) for path in paths)


def scheduled_rounds() -> dict[str, ScheduledRound]:
    """Return the periodic tasks whose rounds beat publishes itself, by name."""
    return {task: rounds for app in integrations() for task, rounds in app.scheduled_rounds.items()}
