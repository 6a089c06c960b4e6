"""Define the alert conditions: a metric and a limit each.

Other apps add conditions through `settings.ALERTS`: dotted paths of lists of `Condition`.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from enum import StrEnum
from typing import Any

import structlog
from celery import current_app
from django.conf import settings
from django.utils.functional import Promise
from django.utils.module_loading import import_string
from django.utils.translation import gettext_lazy as _

from scheduling import sql
from scheduling.channels.circuit_breaker import DEAD_REASONS
from scheduling.db_timeouts import Deadline
from scheduling.models import FailedTask
from scheduling.monitoring import collectors
from scheduling.monitoring.complaint_stats import is_rising
from scheduling.queue_names import CORE_QUEUES, TOUCH_QUEUES

log = structlog.get_logger(__name__)


Words = str | Promise
#: Samples (labels and value) by metric name. A metric that is missing here is unknown at the moment.
MetricSamples = Mapping[str, Sequence[tuple[Mapping[str, str], float]]]


class Unit(StrEnum):
    SPAN = "span"  #: seconds
    COUNT = "count"
    NONE = "none"  #: the condition holds or does not hold


@dataclass(frozen=True)
class Condition:
    """A condition that holds for each sample of a metric beyond its limit."""

    key: str
    metric: str
    title: Words  #: %(what)s is replaced by the subjects
    action: Words
    unit: Unit = Unit.NONE
    limit: float = 0.0  #: default limit
    label: str = ""  #: label whose value is the subject of a sample
    names: Mapping[str, Words] = field(default_factory=dict)  #: display names of subjects
    only: frozenset[str] = frozenset()  #: subjects that count; empty: all
    beyond: Callable[[float, float], bool] = operator.gt
    missing: bool = False  #: the condition holds while the metric is missing, because its source does not answer
    rising: bool = False  #: the condition holds only while the value does not fall below its first value
    page: str = "admin:index"

    def find_violations(self, figures: MetricSamples, limit: float) -> dict[str, float] | None:
        """Return values beyond the limit by subject; None if the metric is unknown."""
        samples = figures.get(self.metric)
        if self.missing:
            return {"": 1.0} if samples is None else {}
        if samples is None:
            return None
        about = [(labels.get(self.label, ""), value) for labels, value in samples]
        return {
            what: value for what, value in about if self.beyond(value, limit) and (not self.only or what in self.only)
        }

    def name(self, what: str) -> str:
        return str(self.names.get(what, what))


OWN = [
    Condition(
        "overdue", "aftertouch_touches_oldest_overdue_seconds", _("Touches are late"),
        _("Are workers alive, is the broker, do queues grow? Add core workers if it is the load."),
        Unit.SPAN, 60, page="admin:scheduling_touch_changelist",
    ),
    Condition(
        "unattended", "queue_unattended", _("No worker consumes %(what)s"),
        _("Start a worker with this queue in -Q. Due work is delayed, not lost."), label="queue",
    ),
    Condition(
        "queue_age", "aftertouch_queue_oldest_age_seconds", _("Messages wait too long in %(what)s"),
        _("Add core workers, or give this queue a worker of its own."), Unit.SPAN, 120, label="queue",
        only=frozenset(TOUCH_QUEUES.values()),
    ),
    Condition(
        "queue_length", "celery_queue_length", _("Growing backlog in %(what)s"),
        _("Add workers; the capacity page computes how many."), Unit.COUNT, 1000, label="queue_name", rising=True,
    ),
    Condition(
        "broker", "celery_queue_length", _("The broker does not answer"),
        _("Restore the broker. Events are accepted. Touches are late and are dispatched again "
            "automatically."), missing=True,
    ),
    Condition(
        "broker_blocked", "aftertouch_broker_blocked", _("The broker takes no messages"),
        _("Add memory or disk to the broker. Touches are kept, are late, and are dispatched again automatically."),
    ),
    Condition(
        "database", "aftertouch_touches_oldest_overdue_seconds", _("PostgreSQL does not answer in time"),
        _("PostgreSQL is unreachable; new events are rejected. Check that it runs, max_connections and disk space."),
        missing=True,
    ),
    Condition(
        "failed_burst", "failed_lately", _("Spike in failed tasks (%(what)s)"),
        _("Look at them grouped by reason; publish one again before all."), Unit.COUNT, 10, label="origin",
        names=dict(FailedTask.Origin.choices), page="admin:scheduling_failedtask_groups",
    ),
    Condition(
        "failed_old", "aftertouch_failed_tasks_oldest_age_seconds", _("Failed tasks not handled (%(what)s)"),
        _("Publish them again, resolve them, or ignore them with a reason."), Unit.SPAN, 86400, label="origin",
        names=dict(FailedTask.Origin.choices), page="admin:scheduling_failedtask_groups",
    ),
    Condition(
        "unanswered", "touches_unanswered", _("Receivers of %(what)s do not answer"),
        _("Their touches wait. Pause the channel while its receiver is down."), Unit.COUNT, 10, label="channel",
        page="admin:scheduling_channelconfig_changelist",
    ),
    Condition(
        "rollout", "rollouts_stopped", _("Automatic roll-out paused (%(what)s)"),
        _("Check the reason and the figures, then resume or stop the roll-out."), label="node",
        page="admin:scheduling_node_changelist",
    ),
    Condition(
        "complaints_rising", "complaints_rising", _("Complaints about %(what)s rise"),
        _("Compare the complaint rates, then edit or switch off the node. A roll-out in steps tries the next text."),
        label="text", page="admin:scheduling_complaint_rates",
    ),
    Condition(
        "webhook", "aftertouch_webhook_resting", _("Webhook %(what)s gets no answer"),
        _("Its messages wait, each for a day at most. Repair the receiver; enable the webhook to send at once."),
        label="webhook", page="admin:scheduling_webhooksubscription_changelist",
    ),
    Condition(
        "ends_unread", "aftertouch_ends_unread_seconds", _("Ends of touches are not read (%(what)s)"),
        _("Check the ticks worker, and end the transaction that has been open for so long in PostgreSQL. Old rows stay "
            "until then."), Unit.SPAN, 300, label="reader",
        names={"webhooks": _("outgoing webhooks"), "follow-ups": _("follow-ups")},
    ),
    Condition(
        "paused", "aftertouch_pauses_oldest_age_seconds", _("Long pause (%(what)s)"),
        _("Check that the pause is still needed. Paused touches expire."), Unit.SPAN, 86400, label="scope",
        names={"all": _("everything"), "channel": _("a channel"), "node": _("a node"), "shop": _("a shop")},
        page="admin:scheduling_pause_changelist",
    ),
    Condition(
        "erasure_late", "aftertouch_erasures_oldest_age_seconds", _("The erasure of a customer is not done"),
        _("It waits for touches and RPA jobs of the customer. Cancel them or end the pauses that hold them."),
        Unit.SPAN, 86400,
    ),
]  # fmt: skip


def load_conditions() -> dict[str, Condition]:
    """Return all conditions by key: the built-in ones first, then those of other apps."""
    others = [each for path in settings.ALERTS for each in import_string(path)]
    return {each.key: each for each in [*OWN, *others]}


def get_default_limits() -> dict[str, float]:
    """Return the default limits of all conditions by key."""
    return {key: each.limit for key, each in load_conditions().items()}


INSPECT_TIMEOUT = 1.0  #: seconds after the last response of a worker
BURST = timedelta(minutes=10)
SOON = timedelta(minutes=10)
MOST = 10_000
Samples = Sequence[tuple[Mapping[str, str], float]]


def read_metrics(wanted: frozenset[str]) -> MetricSamples:
    """Read the current metrics. Queries that only alerts need run only if their metric is in `wanted`."""
    deadline = Deadline(settings.TIMEOUTS.metrics)
    found: dict[str, Samples] = {
        family.name: [(each.labels, each.value) for each in family.samples]
        for families in collectors.collect_metrics(deadline)
        for family in families
    }
    for name, label, statement, parameters in _COUNTED:
        if name in wanted:
            found |= _count_rows(deadline, name, label, statement, parameters)
    if "complaints_rising" in wanted and "aftertouch_complaint_rate" in found:
        found |= _find_rising_complaints(found)
    if "queue_unattended" in wanted and "celery_queue_length" in found:
        found |= _find_unattended_queues(found["celery_queue_length"])
    return found


def _count_rows(
    deadline: Deadline, name: str, label: str, statement: str, parameters: Mapping[str, Any]
) -> dict[str, Samples]:
    try:
        with deadline.limit_queries(settings.TIMEOUTS.metrics_statement):
            return {name: [({label: key}, float(count)) for key, count in sql.rows(statement, parameters)]}
    except Exception as error:
        log.warning("alert_figure_missing", figure=name, error=str(error))
        return {}


def _find_rising_complaints(found: Mapping[str, Samples]) -> dict[str, Samples]:
    """Return the texts of `ComplaintCollector` whose rate rises."""
    before, touches = (
        {tuple(labels.values()): value for labels, value in found[f"aftertouch_complaint_{name}"]}
        for name in ("rate_before", "touches")
    )
    rising = []
    for labels, rate in found["aftertouch_complaint_rate"]:
        text = tuple(labels.values())
        if is_rising(int(touches[text]), rate, before.get(text)):
            rising.append(({"text": "{node}: {template} v{version}".format(**labels)}, rate))
    return {"complaints_rising": rising}


def _find_unattended_queues(lengths: Samples) -> dict[str, Samples]:
    """Return queues that hold messages, or always may, and that no worker consumes.

    Asks the workers directly, because their metrics are known on their own node only.
    """
    try:
        consumed = _list_consumed_queues()
    except Exception as error:  # any exception of the broker's client
        log.warning("alert_figure_missing", figure="queue_unattended", error=str(error))
        return {}
    # A core queue needs a consumer even while it is empty.
    needed = {*CORE_QUEUES} | {labels["queue_name"] for labels, length in lengths if length}
    return {"queue_unattended": [({"queue": name}, 1.0) for name in sorted(needed - consumed)]}


def _list_consumed_queues() -> set[str]:
    with current_app.connection_for_read() as connection:
        connection.ensure_connection(max_retries=1, timeout=INSPECT_TIMEOUT)
        answers = current_app.control.inspect(timeout=INSPECT_TIMEOUT, connection=connection).active_queues() or {}
    return {queue["name"] for queues in answers.values() for queue in queues}


_FAILED_LATELY = """
SELECT origin, count(*) FROM (
    SELECT origin FROM scheduling_failedtask
    WHERE state = 'open' AND failed_at > statement_timestamp() - %(burst)s LIMIT %(most)s
) AS lately GROUP BY 1
"""

# Touches deferred because a receiver did not answer, by channel.
_UNANSWERED = """
SELECT channel.key, count(*) FROM (
    SELECT touch.node_id, touch.reason FROM unnest(ARRAY[0, 1, 2]) AS level CROSS JOIN LATERAL (
        SELECT node_id, reason FROM scheduling_touch_live
        WHERE state = 'scheduled' AND paused_by = '' AND priority = level
          AND due_at <= statement_timestamp() + %(soon)s
        ORDER BY due_at LIMIT %(most)s
    ) AS touch
) AS soon
JOIN scheduling_node AS node ON node.id = soon.node_id
JOIN scheduling_channelconfig AS channel ON channel.id = node.channel_id
WHERE soon.reason = ANY(%(dead)b) GROUP BY 1
"""

_ROLLOUTS = """
SELECT node.key, count(*) FROM scheduling_automaticrollout AS rollout
JOIN scheduling_node AS node ON node.id = rollout.node_id
WHERE rollout.state = 'paused' AND (starts_with(rollout.reason, 'limit:') OR rollout.reason = 'unseen') GROUP BY 1
"""

_COUNTED: tuple[tuple[str, str, str, Mapping[str, Any]], ...] = (
    ("failed_lately", "origin", _FAILED_LATELY, {"most": MOST, "burst": BURST}),
    (
        "touches_unanswered", "channel", _UNANSWERED,
        {"most": MOST, "soon": SOON, "dead": sorted({*DEAD_REASONS, "target_down"})},
    ),
    ("rollouts_stopped", "node", _ROLLOUTS, {}),
)  # fmt: skip
