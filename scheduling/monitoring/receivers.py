"""Show each receiver that touches wait for or are sent to: what waits, how fast it takes touches, why it rests.

PostgreSQL holds what waits, Redis the quotas and the reports of the processes (`delivery.lanes`). A page
counts only its own receivers, each up to a bound. Touches for addresses of customers count by channel. So do touches
that wait for a webhook, also where a community has an address of its own.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from functools import cache
from typing import Any, NamedTuple

import structlog
from django.conf import settings

from scheduling import sql
from scheduling.channels.base import Quota, Quotas, channel_kinds
from scheduling.channels.quota import PeriodUse, QuotaGate, QuotaState
from scheduling.configuration import snapshot
from scheduling.configuration.snapshot import Snapshot
from scheduling.delivery.lanes import LaneLoad, read_receiver_loads
from scheduling.delivery.routing import NoTarget, Route, channel_of, find_route, load_community_targets
from scheduling.models.encrypted import Unreadable
from scheduling.policy.specs import ChannelSpec, CustomerSpec
from scheduling.redis_client import RedisError

log = structlog.get_logger(__name__)

MOST_RECEIVERS = 1_000  #: receivers with waiting touches that are listed, for each node
COUNTED_BY_PAGE = 200_000  #: waiting touches, the same share for each receiver


@dataclass(slots=True)
class ReceiverStatus:
    """The figures of one receiver, added up source by source. Times are PostgreSQL's."""

    channel: ChannelSpec
    chat_id: str = ""  #: a community with this target; empty: the address of the channel or of customers
    nodes: list[int] = field(default_factory=list)
    latest_due: datetime | None = None  #: of the touches that wait in the table
    waiting: int = 0  #: in the table and in processes
    counted_all: bool = True  #: False: more wait than were counted
    in_flight: int = 0
    rate: float | None = None  #: touches a second; None: not known
    rest: float = 0.0  #: seconds that circuit breakers rest
    resting_until: datetime | None = None
    resting_reason: str = ""  #: "paused", "target_down", "throttled", "month", "day"; empty: it does not rest
    ends_at: datetime | None = None  #: when the last waiting touch is planned to go
    uses: tuple[PeriodUse, ...] = ()
    route: Route | None = None

    def add_due(self, due_at: datetime | None) -> None:
        self.latest_due = max(filter(None, (self.latest_due, due_at)), default=None)


class ReceiverPage(NamedTuple):
    rows: Sequence[ReceiverStatus]
    more: bool  #: another page follows
    incomplete: bool  #: Redis did not answer: figures of processes and quotas are missing


def list_receivers(offset: int, limit: int) -> ReceiverPage:
    """Return a page of receivers: those whose waiting touches go last first, then those without waiting touches.

    Four statements and three requests to Redis for any number of receivers.

    Raises:
        OperationalError: PostgreSQL exceeds the caller's time limit.
    """
    config = snapshot.current()
    now = sql.now()
    loads: Mapping[str, LaneLoad] = {}
    incomplete = False
    try:
        loads = read_receiver_loads()
    except RedisError as error:
        log.warning("receivers_unanswered", error=str(error))
        incomplete = True
    found = _find_waiting(config)
    _merge_loads(found, loads, config)
    ordered = sorted(found.values(), key=lambda each: each.channel.key)
    ordered.sort(key=lambda each: each.latest_due.timestamp() if each.latest_due else 0.0, reverse=True)
    rows = ordered[offset : offset + limit]
    _count_waiting(rows)
    states = _read_quota_states(rows)
    for number, row in enumerate(rows):
        _add_plan(row, (states or {}).get(number), config, now)
    return ReceiverPage(rows, len(ordered) > offset + limit, incomplete or states is None)


# --- the receivers ------------------------------------------------------------------------------------------------


def _names_community(spec: ChannelSpec) -> bool:
    """Return whether each touch of the channel goes to the target of its community."""
    kind = channel_kinds().get(spec.kind)
    return kind is not None and kind.needs_target and not kind.address_key


def _find_waiting(config: Snapshot) -> dict[str, ReceiverStatus]:
    """Return the receivers with waiting touches, by lane."""
    by_node = {key: node.channel for key, node in config.nodes.items() if not node.channel.retired}
    by_chat = [key for key, spec in by_node.items() if _names_community(spec)]
    others = [key for key in by_node if key not in by_chat]
    pairs = sql.rows(_WAITING_CHATS, {"nodes": by_chat, "most": MOST_RECEIVERS})
    pairs += sql.rows(_WAITING_NODES, {"nodes": others})
    communities = load_community_targets(chat_id for _, chat_id, _ in pairs)
    found: dict[str, ReceiverStatus] = {}
    for node_id, chat_id, latest_due in pairs:
        spec = by_node[node_id]
        route = _find_channel_route(spec, chat_id, communities)
        key = route.receiver if route else f"{spec.id}:{chat_id}"
        row = found.setdefault(key, ReceiverStatus(spec, chat_id, route=route))
        row.nodes.append(node_id)
        row.add_due(latest_due)
    return found


def _find_channel_route(spec: ChannelSpec, chat_id: str, communities: Mapping[str, Mapping[str, Any]]) -> Route | None:
    """Return the route of a channel's touches for a community. All addresses of customers count as one receiver."""
    with suppress(NoTarget, Unreadable):
        customer = CustomerSpec(0, "", addresses={channel_of(spec).address_key: "*"})
        found = find_route(spec, customer, chat_id, communities, ())
        return found if isinstance(found, Route) else None
    return None


def _merge_loads(found: dict[str, ReceiverStatus], loads: Mapping[str, LaneLoad], config: Snapshot) -> None:
    """Add what the processes hold, and the receivers that only they know."""
    communities = load_community_targets(each.chat_id for each in loads.values() if each.receiver not in found)
    for load in loads.values():
        spec = config.channels.get(int(load.receiver.partition(":")[0]))
        if spec is None:
            continue
        key, chat_id = load.receiver, load.chat_id
        if key not in found:
            if not {spec.key, spec.kind}.intersection(communities.get(chat_id, ())):
                chat_id = ""
            route = _find_channel_route(spec, chat_id, communities)
            if route is None or route.receiver != key:  # an address of a customer, or one that has changed since
                route = None
                key = next((each for each, row in found.items() if row.channel is spec and not row.chat_id), key)
            found.setdefault(key, ReceiverStatus(spec, chat_id, route=route))
        row = found[key]
        row.in_flight += load.in_flight
        row.waiting += load.held
        row.rate = (row.rate or 0.0) + load.rate
        row.rest = max(row.rest, load.rest)


def _count_waiting(rows: Sequence[ReceiverStatus]) -> None:
    """Count the touches that wait in the table for these receivers."""
    most = COUNTED_BY_PAGE // max(len(rows), 1)
    parts = [
        (number, node_id, row.chat_id if _names_community(row.channel) else None)
        for number, row in enumerate(rows)
        for node_id in row.nodes
    ]
    numbers, nodes, chats = zip(*parts, strict=True) if parts else ((), (), ())
    parameters = {"numbers": list(numbers), "nodes": list(nodes), "chats": list(chats), "most": most}
    for number, count, latest_due, complete in sql.rows(_COUNT_WAITING, parameters):
        row = rows[number]
        row.waiting += count
        row.add_due(latest_due)
        row.counted_all = complete


# --- their plans --------------------------------------------------------------------------------------------------


def _read_quota_states(rows: Sequence[ReceiverStatus]) -> dict[int, QuotaState] | None:
    """Return the state of the quotas by row; None if Redis does not answer."""
    counting = {number: row.route for number, row in enumerate(rows) if row.route and _list_common_quotas(row.route)}
    try:
        states = _connect_quotas(settings.REDIS_URL).read_states(
            [(route.vendor_key, route.channel.quotas) for route in counting.values()]
        )
    except RedisError as error:
        log.warning("quotas_unanswered", error=str(error))
        return None
    return dict(zip(counting, states, strict=True))


def _list_common_quotas(route: Route) -> Quotas:
    """Return the quotas that all touches of the receiver share. Those of single addresses do not bound it."""
    return () if route.channel.counts_addresses else route.channel.quotas


@cache
def _connect_quotas(url: str) -> QuotaGate:
    return QuotaGate.connect(url)


def _add_plan(row: ReceiverStatus, state: QuotaState | None, config: Snapshot, now: datetime) -> None:
    row.resting_reason, row.resting_until = _find_rest(row, state, config, now)
    windows = [each for each in _list_common_quotas(row.route) if isinstance(each, Quota)] if row.route else []
    if windows:
        row.rate = min(each.limit / each.window.total_seconds() for each in windows)
    if row.waiting and row.resting_reason != "paused":
        limited = bool(row.route and row.route.channel.quotas)
        by_pace = now + timedelta(seconds=row.rest + row.waiting / row.rate) if row.rate and not limited else now
        last_slot = now + state.last_slot if state and state.last_slot else now
        row.ends_at = max(row.latest_due or now, by_pace, last_slot)
    row.uses = state.uses if state else ()


def _find_rest(
    row: ReceiverStatus, state: QuotaState | None, config: Snapshot, now: datetime
) -> tuple[str, datetime | None]:
    """Return why a receiver gets nothing now, and until when. A pause lasts until an operator ends it."""
    if config.paused & {"all", f"channel:{row.channel.key}"} or (
        row.nodes and config.paused_nodes.issuperset(row.nodes)
    ):
        return "paused", None
    if state and state.muted:
        return "throttled", now + state.muted
    if row.rest:
        return "target_down", now + timedelta(seconds=row.rest)
    full = [use for use in state.uses if use.used >= use.limit] if state else []
    if full:
        last = max(full, key=lambda use: use.ends_in)
        return last.period, now + last.ends_in
    return "", None


# Each statement repeats the condition of the index `touch_deferred`. The chats of a node take one probe each.
_WAITING_CHATS = """
SELECT node.id, chat.chat_id, chat.latest_due FROM unnest(%(nodes)b::bigint[]) AS node(id) CROSS JOIN LATERAL (
    WITH RECURSIVE found AS (
        (SELECT chat_id FROM scheduling_touch_live
         WHERE state IN ('scheduled', 'queued') AND reason IN ('quota', 'target_busy', 'target_down')
           AND node_id = node.id
         ORDER BY chat_id LIMIT 1)
        UNION ALL
        SELECT (SELECT chat_id FROM scheduling_touch_live
                WHERE state IN ('scheduled', 'queued') AND reason IN ('quota', 'target_busy', 'target_down')
                  AND node_id = node.id AND chat_id > found.chat_id
                ORDER BY chat_id LIMIT 1)
        FROM found WHERE chat_id IS NOT NULL
    )
    SELECT chat_id, (
        SELECT due_at FROM scheduling_touch_live
        WHERE state IN ('scheduled', 'queued') AND reason IN ('quota', 'target_busy', 'target_down')
          AND node_id = node.id AND chat_id = found.chat_id
        ORDER BY due_at DESC LIMIT 1
    ) AS latest_due
    FROM found WHERE chat_id IS NOT NULL LIMIT %(most)s
) AS chat
"""

_WAITING_NODES = """
SELECT node.id, '', touch.due_at FROM unnest(%(nodes)b::bigint[]) AS node(id) CROSS JOIN LATERAL (
    SELECT due_at FROM scheduling_touch_live
    WHERE state IN ('scheduled', 'queued') AND reason IN ('quota', 'target_busy', 'target_down') AND node_id = node.id
    LIMIT 1
) AS touch
"""

_COUNT_WAITING = """
SELECT part.number, sum(LEAST(touch.size, %(most)s))::bigint, max(touch.latest_due), bool_and(touch.size <= %(most)s)
FROM unnest(%(numbers)b::int[], %(nodes)b::bigint[], %(chats)s::text[]) AS part(number, node_id, chat_id)
CROSS JOIN LATERAL (
    SELECT count(*) AS size, max(due_at) AS latest_due FROM (
        (SELECT due_at FROM scheduling_touch_live
         WHERE state IN ('scheduled', 'queued') AND reason IN ('quota', 'target_busy', 'target_down')
           AND node_id = part.node_id AND chat_id = part.chat_id
         LIMIT %(most)s + 1)
        UNION ALL
        (SELECT due_at FROM scheduling_touch_live
         WHERE state IN ('scheduled', 'queued') AND reason IN ('quota', 'target_busy', 'target_down')
           AND part.chat_id IS NULL AND node_id = part.node_id
         LIMIT %(most)s + 1)
    ) AS counted
) AS touch GROUP BY part.number
"""
