"""What is worth waking somebody for: figures that the house measures anyway, each with a limit.

Other apps add theirs by `settings.ALERTS`: dotted paths of lists of conditions.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum

from django.conf import settings
from django.utils.functional import Promise
from django.utils.module_loading import import_string
from django.utils.translation import gettext_lazy as _

from scheduling.models import FailedTask

Words = str | Promise
#: By the name of a metric, its samples: labels and value. A metric that is not here is not known at the moment.
Figures = Mapping[str, Sequence[tuple[Mapping[str, str], float]]]


class Unit(StrEnum):
    SPAN = "span"  #: seconds
    COUNT = "count"
    NONE = "none"  #: it holds or it does not


@dataclass(frozen=True)
class Condition:
    """Holds for each sample of a metric that is beyond its limit."""

    key: str
    metric: str
    title: Words  #: %(what)s is what the samples are about
    action: Words
    unit: Unit = Unit.NONE
    limit: float = 0.0  #: where ops choose none
    label: str = ""  #: of the samples, what they are about
    names: Mapping[str, Words] = field(default_factory=dict)  #: of what they are about, for people
    only: frozenset[str] = frozenset()  #: of what they are about, those that count; empty: all
    beyond: Callable[[float, float], bool] = operator.gt
    missing: bool = False  #: holds while the metric itself is missing: its source does not answer
    rising: bool = False  #: is told only where it has not become less meanwhile
    page: str = "admin:index"

    def found(self, figures: Figures, limit: float) -> dict[str, float] | None:
        """By what it is about, the figure that is beyond the limit. None where nobody knows."""
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
        _("Start a worker with this queue in -Q. What is due meanwhile comes late and is not lost."), label="queue",
    ),
    Condition(
        "queue_age", "aftertouch_queue_oldest_age_seconds", _("Messages wait too long in %(what)s"),
        _("Add core workers, or give this queue a worker of its own."), Unit.SPAN, 120, label="queue",
        only=frozenset({"touch.high", "touch.normal", "touch.low"}),
    ),
    Condition(
        "queue_length", "celery_queue_length", _("More and more waits in %(what)s"),
        _("Add workers; the capacity page computes how many."), Unit.COUNT, 1000, label="queue_name", rising=True,
    ),
    Condition(
        "broker", "celery_queue_length", _("The broker does not answer"),
        _("Bring it back. Events are accepted, come late, and are handed over again by themselves."), missing=True,
    ),
    Condition(
        "broker_blocked", "aftertouch_broker_blocked", _("The broker takes no messages"),
        _("Give it memory or disk. Touches are kept, come late, and are handed over again by themselves."),
    ),
    Condition(
        "database", "aftertouch_touches_oldest_overdue_seconds", _("PostgreSQL does not answer in time"),
        _("Is it up? Are its connections used up, is its disk full? Nothing is accepted while it is away."),
        missing=True,
    ),
    Condition(
        "failed_burst", "failed_lately", _("Failed tasks come in numbers (%(what)s)"),
        _("Look at them grouped by reason; publish one again before all."), Unit.COUNT, 10, label="origin",
        names=dict(FailedTask.Origin.choices), page="admin:scheduling_failedtask_groups",
    ),
    Condition(
        "failed_old", "aftertouch_failed_tasks_oldest_age_seconds", _("Failed tasks wait for a person (%(what)s)"),
        _("Publish them again, resolve them, or ignore them with a reason."), Unit.SPAN, 86400, label="origin",
        names=dict(FailedTask.Origin.choices), page="admin:scheduling_failedtask_groups",
    ),
    Condition(
        "unanswered", "touches_unanswered", _("Receivers of %(what)s do not answer"),
        _("Their touches wait. Pause the channel while its receiver is down."), Unit.COUNT, 10, label="channel",
        page="admin:scheduling_channelconfig_changelist",
    ),
    Condition(
        "rollout", "rollouts_stopped", _("A guarded roll-out paused by itself (%(what)s)"),
        _("Look at its reason and its figures, then let it go on or end it."), label="node",
        page="admin:scheduling_node_changelist",
    ),
    Condition(
        "paused", "aftertouch_pauses_oldest_age_seconds", _("A pause holds for long (%(what)s)"),
        _("Is it still meant? What it holds back expires."), Unit.SPAN, 86400, label="scope",
        names={"all": _("everything"), "channel": _("a channel"), "node": _("a node"), "shop": _("a shop")},
        page="admin:scheduling_pause_changelist",
    ),
]  # fmt: skip


def conditions() -> dict[str, Condition]:
    """All of them by key, those of other apps behind our own."""
    others = [each for path in settings.ALERTS for each in import_string(path)]
    return {each.key: each for each in [*OWN, *others]}


def usual_limits() -> dict[str, float]:
    return {key: each.limit for key, each in conditions().items()}
