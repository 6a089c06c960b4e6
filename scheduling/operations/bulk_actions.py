"""Apply one action to all rows of a list that match a filter, in batches of a periodic pass.

A batch is one transaction that holds the lock of the action's row. Its effects and its progress commit together: a
batch whose worker dies has no effect, and the next pass repeats it. No lock is held between two batches. The ledger is
the rate limiter: each row is published with its own due time, at most one pass ahead.

The filter is the URL parameters of a list. An unknown parameter is refused: ignoring it would affect more rows than the
user has seen. Other apps add lists and actions (`Integration.bulk_lists`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from functools import partial
from math import ceil
from types import MappingProxyType
from typing import Any
from uuid import UUID

import structlog
from django.conf import settings
from django.contrib.auth.models import User
from django.db import OperationalError, close_old_connections, connection, transaction
from django.db.models import Model, Q, QuerySet
from django.db.models.functions import Now
from django.utils.functional import Promise
from django.utils.timezone import make_aware, now
from django.utils.translation import gettext_lazy

from scheduling import sql
from scheduling.app_integrations import integrations
from scheduling.audit import record_action
from scheduling.error_text import ErrorText as _
from scheduling.errors import Conflict, FieldError, InvalidInput, NotFound
from scheduling.ledger import locks
from scheduling.models import WAITING, BulkAction, FailedTask, Scope, Touch
from scheduling.operations import commands, failed_tasks, queries
from scheduling.operations.failed_tasks import Actor
from scheduling.operations.queries import filter_failed_by_shown_term
from scheduling.policy.specs import OVERDUE_AFTER

log = structlog.get_logger(__name__)

#: Parameters that affect only how a list is displayed.
DISPLAY_PARAMETERS = frozenset({"o", "p", "all", "e", "_facets"})
MAX_VALUE_LENGTH = 200  #: characters per value
Read = Callable[[str], Q]
ReadAt = Callable[[str, datetime], Q]


def read_filter(address: Mapping[str, Any]) -> dict[str, str]:
    """Return the filter in the URL parameters of a list.

    Raises:
        InvalidInput: a parameter is given twice; the error names it.
    """
    chosen = {}
    for name in address:
        values = address.getlist(name) if hasattr(address, "getlist") else [address[name]]
        if len(values) > 1:
            raise InvalidInput.of(name, _("is given twice"))
        if name not in DISPLAY_PARAMETERS:
            chosen[name] = str(values[0])
    return chosen


@dataclass(frozen=True, slots=True)
class FilteredList:
    model: type[Model]
    since: str  #: field with the time since when a row belongs to the list
    parameters: Mapping[str, Read]
    spans: tuple[str, ...]
    usual: Mapping[str, str]  #: values of parameters that are absent
    timed: Mapping[str, ReadAt] = field(default_factory=dict)  #: parameters whose matching rows change with time

    def matching_rows(self, chosen: Mapping[str, str], as_of: datetime) -> QuerySet[Any]:
        """Return the rows that existed at `as_of` and match the filter.

        Raises:
            InvalidInput: parameters have no meaning; the error names each.
        """
        return self.model._default_manager.filter(self.build_query(chosen, as_of), **{f"{self.since}__lte": as_of})

    def build_query(self, chosen: Mapping[str, str], as_of: datetime) -> Q:
        wanted, errors = Q(), []
        for name, value in {**self.usual, **chosen}.items():
            try:
                wanted &= self._read(name, value, chosen, as_of)
            except ValueError:
                errors.append(FieldError(name, _("“%(given)s” cannot be meant", given=value[:50])))
            except KeyError:
                errors.append(FieldError(name, _("many cannot be chosen by it")))
        if errors:
            raise InvalidInput(*errors)
        return wanted

    def _read(self, name: str, value: str, chosen: Mapping[str, str], as_of: datetime) -> Q:
        if len(value) > MAX_VALUE_LENGTH or "\0" in value:
            raise ValueError
        for span in self.spans:
            for end, compare in (("from", "gte"), ("to", "lt")):
                day, time = f"{span}_{end}_0", f"{span}_{end}_1"
                if name == day and value:
                    return Q(**{f"{span}__{compare}": _parse_date_time(value, chosen.get(time, ""))})
                if name in (day, time):
                    return Q()
        return self.timed[name](value, as_of) if name in self.timed else self.parameters[name](value)


def _parse_date_time(day: str, time: str) -> datetime:
    """Parse a date and time in the server's time zone. Without a time the start of the day applies."""
    for form in settings.DATETIME_INPUT_FORMATS:
        try:
            return make_aware(datetime.strptime(f"{day} {time or '00:00'}", form))  # noqa: DTZ007
        except ValueError:
            continue
    raise ValueError


def compare_value(field: str) -> Read:
    """Filter by equality like the list itself: an empty value means no filter."""
    return lambda value: Q(**{field: value}) if value else Q()


def compare_number(field: str) -> Read:
    return lambda value: Q(**{field: int(value)}) if value else Q()


# --- failed tasks -------------------------------------------------------------------------------------------------


def filter_failed_state(value: str) -> Q:
    """Filter by state: an empty value means open, "all" means no filter."""
    return Q() if value == "all" else Q(state=value or FailedTask.State.OPEN.value)


# --- touches ------------------------------------------------------------------------------------------------------


def filter_effective_state(value: str, as_of: datetime | None = None) -> Q:
    """Return the filter of a combined state: at `as_of`, or now.

    Raises:
        ValueError: the value is unknown.
    """
    due = Q(state="scheduled", paused_by="")
    meant = {
        "": Q(),
        "waiting": due,
        "overdue": (due | Q(state="queued")) & Q(due_at__lt=(as_of or now()) - OVERDUE_AFTER),
        "paused": Q(state__in=WAITING) & ~Q(paused_by="") & (Q(due_at__lte=as_of) if as_of else Q()),
        "bad": Q(state__in=("failed", "unknown")),
    }
    if value not in meant:
        raise ValueError
    return meant[value]


def _filter_named_touch(term: str) -> Q:
    """Filter by complete ids only. A text search finds sent messages, and those no longer wait."""
    term = term.strip()
    if not term:
        return Q()
    named = Q(customer__user_id=term) | Q(event_id__in=queries.find_events_by_term(term)) | Q(chat_id=term)
    with suppress(ValueError):
        uuid = UUID(term)
        named |= Q(task_id=uuid) | Q(root_id=uuid)
    return named


FAILED_TASK_ROWS = FilteredList(
    FailedTask,
    "failed_at",
    {
        "state": filter_failed_state, "origin__exact": compare_value("origin"), "reason": compare_value("reason"),
        "channel": compare_value("channel"), "failure": compare_value("failure"),
        "fingerprint": lambda value: Q(fingerprint=value),
    },
    ("failed_at",),
    {"state": ""},
    {"q": filter_failed_by_shown_term},
)  # fmt: skip
TOUCH_ROWS = FilteredList(
    Touch,
    "created_at",
    {
        "state__exact": compare_value("state"), "reason": compare_value("reason"),
        "state__in": lambda value: Q(state__in=value.split(",")), "node__id__exact": compare_number("node_id"),
        "node__channel__id__exact": compare_number("node__channel_id"), "priority__exact": compare_number("priority"),
        "q": _filter_named_touch,
    },
    ("due_at", "settled_at"),
    {},
    {"status": filter_effective_state},
)  # fmt: skip


FAILED_TASKS, TOUCHES = "failed_task", "touch"
Given = Mapping[str, Any]


def refuse_parameters(given: Given) -> None:
    """Check the parameters of an action that takes none.

    Raises:
        InvalidInput: there is one; the error names it.
    """
    if given:
        raise InvalidInput(*(FieldError(f"given.{name}", _("is no parameter of this action")) for name in given))


@dataclass(frozen=True, slots=True)
class RowAction:
    """An action on one row.

    Raises:
        Conflict: another process changed the row first, or its state does not allow the action.
        NotFound: the row does not exist.
    """

    over: str
    function: Callable[..., Any]
    states: tuple[str, ...]
    permission: str  #: of a user who may start and stop it
    title: str | Promise = ""
    unknown_only: bool = False
    publishes: bool = False
    as_new: bool = False  #: the customer may receive a message twice
    per_second: float = 200  #: default rate in rows per second
    #: Check the parameters that a user gives. Raises `InvalidInput`.
    check: Callable[[Given], None] = refuse_parameters
    #: Return the parameters that restrict the action to the rights of the user who starts it. Workers check no rights.
    restrict: Callable[[User], Given] = lambda user: {}
    #: Lock what a batch needs, and return the order in which one transaction may change the rows. None: any order
    #: works, because the action waits for no other transaction.
    lock: Callable[[Sequence[UUID]], Sequence[UUID]] | None = None

    def act(self, key: UUID, actor: Actor, due_at: datetime | None = None, given: Given = MappingProxyType({})) -> Any:
        timing = {"due_at": due_at} if self.publishes else {}
        return self.function(key, actor, **timing, **given)

    def allowed_rows(self, rows: QuerySet[Any]) -> QuerySet[Any]:
        rows = rows.filter(state__in=self.states)
        return rows.filter(failure="unknown") if self.unknown_only else rows


def _cancel_row(task_id: UUID, actor: Actor) -> None:
    # A batch locks up to a hundred touches, and settling locks many in any order, so waiting could deadlock.
    commands.cancel_one_touch(task_id, actor=actor.name, wait=False)


def _lock_customers_first(task_ids: Sequence[UUID]) -> Sequence[UUID]:
    """Lock the customers of these touches before the touches, as every writer does."""
    locks.lock_customers_of_touches(task_ids)
    return task_ids


OPEN, IGNORED = FailedTask.State.OPEN.value, FailedTask.State.IGNORED.value
#: Rows per second: low enough not to flood a receiver that has just recovered.
RETRY_RATE = 50
_HANDLES: dict[str, Any] = {"permission": "scheduling.act_on_failedtask"}
_REPUBLISHES: dict[str, Any] = {
    **_HANDLES, "publishes": True, "per_second": RETRY_RATE, "lock": failed_tasks.lock_in_publish_order,
}  # fmt: skip
_retry_as_new = partial(failed_tasks.retry_failed_task, as_new=True)
_resolve_delivered = partial(failed_tasks.resolve_failed_task, delivered=True)
_resolve_not_delivered = partial(failed_tasks.resolve_failed_task, delivered=False)
ROW_ACTIONS: dict[str, RowAction] = {
    "retry": RowAction(FAILED_TASKS, failed_tasks.retry_failed_task, (OPEN, IGNORED), **_REPUBLISHES),
    "again": RowAction(FAILED_TASKS, _retry_as_new, (OPEN, IGNORED), as_new=True, **_REPUBLISHES),
    "delivered": RowAction(FAILED_TASKS, _resolve_delivered, (OPEN,), unknown_only=True, **_HANDLES),
    "not_delivered": RowAction(FAILED_TASKS, _resolve_not_delivered, (OPEN,), unknown_only=True, **_HANDLES),
    "ignore": RowAction(FAILED_TASKS, failed_tasks.ignore_failed_task, (OPEN,), **_HANDLES),
    "archive": RowAction(FAILED_TASKS, failed_tasks.archive_failed_task, (OPEN, IGNORED), **_HANDLES),
    "cancel": RowAction(
        TOUCHES,
        _cancel_row,
        WAITING,
        "scheduling.change_touch",
        gettext_lazy("Cancel the touch"),
        lock=_lock_customers_first,
    ),
}


@dataclass(frozen=True, slots=True)
class BulkList:
    """A list whose rows bulk actions change."""

    rows: FilteredList
    label: str | Promise
    changelist: str  #: name of the list's page
    scope: str = ""  #: of an API key that may read and stop its bulk actions; empty: no key may
    #: Actions of a leaf app by name. A name starts with that of the list: `job.cancel`.
    actions: Mapping[str, RowAction] = field(default_factory=dict)
    #: Parameters of the page by their names in the filter, where the two differ.
    page_names: Mapping[str, str] = field(default_factory=dict)


LISTS = {
    FAILED_TASKS: BulkList(
        FAILED_TASK_ROWS,
        gettext_lazy("Failed tasks"),
        "admin:scheduling_failedtask_changelist",
        Scope.FAILED_TASKS.value,
    ),
    TOUCHES: BulkList(TOUCH_ROWS, gettext_lazy("Touches"), "admin:scheduling_touch_changelist"),
}


def get_list(over: str) -> BulkList:
    leaf_lists = {name: listed for app in integrations() for name, listed in app.bulk_lists.items()}
    return LISTS.get(over) or leaf_lists[over]


def find_row_action(name: str) -> RowAction | None:
    """Return the action of this name; None if there is none, for example after an upgrade."""
    with suppress(KeyError):
        return ROW_ACTIONS.get(name) or get_list(name.partition(".")[0]).actions[name]
    return None


def get_row_action(name: str) -> RowAction:
    """As `find_row_action`. Raises `InvalidInput` if there is none."""
    row_action = find_row_action(name)
    if row_action is None:
        raise InvalidInput.of("action", _("there is no “%(name)s”", name=name[:50]))
    return row_action


def matching_rows(row_action: RowAction, chosen: Mapping[str, str], as_of: datetime) -> QuerySet[Any]:
    """Return the rows that existed at `as_of`, match the filter and allow the action.

    Raises:
        InvalidInput: parameters have no meaning; the error names each.
    """
    return row_action.allowed_rows(get_list(row_action.over).rows.matching_rows(chosen, as_of))


BATCH = 100  #: most rows per transaction
PASS_INTERVAL = timedelta(seconds=5)  #: of `continue_bulk_actions`
SLOWEST, FASTEST = 0.1, 200.0  #: rows per second
MOST_RUNNING = 20
MAX_TRIES = 5  #: errors of one batch before the action fails
START_LOCK_ID = 4_163_072  #: advisory lock for starting an action

State = BulkAction.State


# --- user ---------------------------------------------------------------------------------------------------------


def start_bulk_action(
    action: str, chosen: Mapping[str, str], actor: Actor, *, per_second: float | None = None,
    as_of: datetime | None = None, given: Given | None = None, after: timedelta = timedelta(0),
) -> BulkAction:  # fmt: skip
    """Start an action on all rows that match `chosen` and existed at `as_of` (default: now).

    `per_second` is the rate in rows per second. `given` are the parameters of the action. The rights of the acting user
    may add some. The first batch starts `after` now.

    Raises:
        InvalidInput: a parameter has no meaning; the error names it.
        Conflict: the same action is running, or `MOST_RUNNING` others are.
    """
    at = sql.now()  # excludes later rows, by PostgreSQL's clock instead of this node's
    row_action = check_action(action, chosen, as_of or at)
    row_action.check(given or {})
    restriction = row_action.restrict(actor.user) if actor.user else {}
    pace = row_action.per_second if per_second is None else per_second
    if not SLOWEST <= pace <= FASTEST:
        raise InvalidInput.of(
            "per_second", _("must be from %(least)s to %(most)s", least=f"{SLOWEST:g}", most=f"{FASTEST:g}")
        )
    row = BulkAction(
        action=action, filter=dict(chosen), actor=actor.user, actor_name=actor.name[:150], reason=actor.reason[:500],
        per_second=pace, as_of=min(as_of or at, at), next_at=at + after, given={**(given or {}), **restriction},
    )  # fmt: skip
    with suppress(OperationalError), sql.limit_statement_time(settings.TIMEOUTS.bulk_count):
        row.total = _matching_rows(row).count()
    with transaction.atomic():
        with connection.cursor() as cursor:  # of two concurrent starts the second sees the first
            cursor.execute("SELECT pg_advisory_xact_lock(%s)", [START_LOCK_ID])
        running = list(BulkAction.objects.filter(state=State.RUNNING).values_list("action", "filter", "given"))
        if (row.action, row.filter, row.given) in running:
            raise Conflict(_("The same bulk action is already running."))
        if len(running) >= MOST_RUNNING:
            raise Conflict(_("Too many bulk actions are running. Try again when one has finished."))
        row.save(force_insert=True)
        facts = [("action", None, row.action), ("rows", None, row.total)]
        record_action("started", row, label=row.action, actor=row.actor_name, reason=row.reason, changes=facts)
    log.info("bulk_action_started", id=str(row.pk), action=action, filter=row.filter, rows=row.total, actor=actor.name)
    return row


def check_action(action: str, chosen: Mapping[str, str], as_of: datetime) -> RowAction:
    """Check action and filter. Return the action.

    Raises:
        InvalidInput: one has no meaning; the error names it.
    """
    row_action = get_row_action(action)
    matching_rows(row_action, chosen, as_of)
    return row_action


def cancel_bulk_action(action_id: UUID, actor: Actor) -> None:
    """Stop an action before its next batch.

    Raises:
        Conflict: the action has ended, or its current batch takes longer than `TIMEOUTS.bulk_cancel`.
        NotFound: there is no such action.
    """
    mine = BulkAction.objects.filter(pk=action_id)
    if _stop_running(mine, actor):
        log.info("bulk_action_cancelled", id=str(action_id), actor=actor.name)
        return
    if mine.exists():
        raise Conflict(_("The bulk action has already ended."))
    raise NotFound(_("There is no bulk action %(action_id)s.", action_id=action_id))


def undo_start(action_id: str, actor: Actor) -> None:
    """Stop an action whose first batch has not started, so that it has changed no row.

    Raises:
        Conflict: it has started or ended.
    """
    untouched = BulkAction.objects.filter(pk=action_id, position=None)
    if not _stop_running(untouched, actor):
        raise Conflict(_("the bulk action has started already; stop it on its page"))


def _stop_running(mine: QuerySet[BulkAction], actor: Actor) -> bool:
    stopped = {"state": State.CANCELLED, "ended_at": now(), "ended_by": actor.name[:150]}
    try:
        with sql.brief_lock_waits(settings.TIMEOUTS.bulk_cancel):
            stopped_rows = list(mine.filter(state=State.RUNNING).select_for_update())
            for row in stopped_rows:
                mine.update(**stopped)
                record_action("cancelled", row, label=row.action, actor=actor.name)
            return bool(stopped_rows)
    except OperationalError as error:
        if not sql.is_lock_timeout(error):
            raise
        raise Conflict(_("A batch of this bulk action is running. Try again in a moment.")) from None


# --- worker -------------------------------------------------------------------------------------------------------


def continue_bulk_actions() -> None:
    """Process the rows of all running actions that are due until the next pass. One that fails stops no other."""
    due = BulkAction.objects.filter(state=State.RUNNING, next_at__lte=Now()).order_by("next_at")
    for action_id in list(due.values_list("pk", flat=True)):
        try:
            until = sql.now() + PASS_INTERVAL
            while _count_try(action_id) and run_batch(action_id, until):
                pass
        except Exception:
            log.exception("bulk_batch_failed", id=str(action_id))
            close_old_connections()


@transaction.atomic
def _count_try(action_id: UUID) -> bool:
    """Count a try before it starts, so that a batch that kills its worker is not repeated without end.

    Return False if the action has failed with it, or if another worker runs its batch.
    """
    running = BulkAction.objects.select_for_update(skip_locked=True, of=("self",))
    row = running.filter(pk=action_id, state=State.RUNNING).first()
    if row is None:
        return False
    if row.tries >= MAX_TRIES:
        row.state, row.ended_at = State.FAILED, now()
        row.note = f"{row.note}\nthe same batch could not be finished {MAX_TRIES} times".strip()
        log.error("bulk_action_abandoned", id=str(row.pk), position=str(row.position))
    else:
        row.tries += 1
    row.save(update_fields=["tries", "state", "ended_at", "note"])
    return row.state == State.RUNNING


def run_batch(action_id: UUID, until: datetime) -> bool:
    """Process at most `BATCH` of the rows due before `until`, each with its due time. Return whether more may be left.

    Of two concurrent workers the second finds the row locked, and leaves the batch to the first.
    """
    with sql.limit_statement_time(settings.TIMEOUTS.bulk_batch):
        running = BulkAction.objects.filter(pk=action_id, state=State.RUNNING, next_at__lt=until)
        mine = running.select_for_update(skip_locked=True, of=("self",))
        row = mine.select_related("actor").annotate(at=Now()).first()
        if row is None:
            return False
        start = max(row.next_at, row.at)  # after an outage the rate holds too
        size = max(1, min(BATCH, ceil((until - start).total_seconds() * row.per_second)))
        _process_batch(row, size, start)
        row.save()
    if row.state != State.RUNNING:
        log.info("bulk_action_done", id=str(row.pk), done=row.done, skipped=row.skipped, failed=row.failed)
    return row.state == State.RUNNING and row.next_at < until


def _process_batch(row: BulkAction, size: int, start: datetime) -> None:
    row_action = get_row_action(row.action)
    rows = _matching_rows(row)
    if row.position:
        rows = rows.filter(pk__gt=row.position)
    keys = list(rows.order_by("pk").values_list("pk", flat=True)[:size])
    actor = Actor(row.actor_name, row.actor, row.reason, is_bulk=True)
    became: Counter[str] = Counter()
    for key in row_action.lock(keys) if row_action.lock else keys:
        due_at = start + timedelta(seconds=became["done"] / row.per_second)
        became[_apply_to_row(row, row_action, key, actor, due_at)] += 1
    row.done += became["done"]
    row.skipped += became["skipped"]
    row.failed += became["failed"]
    row.tries = 0
    if keys:
        row.position = keys[-1]
    if len(keys) < size:
        row.state, row.ended_at = State.DONE, now()
    row.next_at = start + timedelta(seconds=len(keys) / row.per_second)


def _apply_to_row(row: BulkAction, row_action: RowAction, key: UUID, actor: Actor, due_at: datetime) -> str:
    """Process one row within a savepoint, so that its failure does not undo the others."""
    try:
        with transaction.atomic():
            row_action.act(key, actor, due_at, row.given)
    except (Conflict, NotFound):
        return "skipped"
    except sql.UNAVAILABLE_ERRORS:
        raise  # an error of PostgreSQL, not of this row
    except Exception as error:
        log.exception("bulk_row_failed", id=str(row.pk), key=str(key))
        row.note = f"{row.note}\n{key}: {type(error).__name__}: {error}".strip()[:2000]
        return "failed"
    return "done"


def _matching_rows(row: BulkAction) -> QuerySet[Any]:
    return matching_rows(get_row_action(row.action), row.filter, row.as_of)
