"""Wake-up tokens. A token says "look whether something can start"; it names no job, and losing one costs seconds.

One place computes where a job's token goes: the queue of the node that has the shop's browser profile, else the shared
queue of its tier, a queue of its platform, or one of its shop. On RabbitMQ the shared queues hang on the topic
exchange `tasks` by `task.<platform>.<tier>`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from datetime import datetime
from typing import Any

import structlog
from celery import current_app
from django.db.models.functions import Now

from rpa_tasks.lanes import HOME_LEASE, TIERS
from rpa_tasks.models import ExecutionNode, Shop
from scheduling import sql
from scheduling.broker import published_now
from scheduling.broker_alarm import alarm
from scheduling.dispatcher import Doorbell
from scheduling.ledger import Hint

log = structlog.get_logger(__name__)

WAKE = "rpa_tasks.run"


def queue_of(shop: Shop, priority: int) -> str:
    if shop.dedicated_queue:
        return f"s.{shop.platform.key}.{shop.shop_id}"
    if shop.platform.dedicated_queue:
        return f"p.{shop.platform.key}.{TIERS[priority]}"
    return TIERS[priority]


def announce(hints: Sequence[Hint]) -> None:
    """Publish a token for each of these jobs, for the moment it is due. Raises nothing: a token that is lost is made
    up for by the next look at the lanes."""
    shops = Shop.objects.select_related("platform", "lane").in_bulk({hint.route for hint in hints})
    homes = _homes({shop.lane.home for shop in shops.values()} - {""})
    now = sql.now()
    tokens = []
    for hint in hints:
        if shop := shops.get(hint.route):
            queue = queue_of(shop, hint.priority)
            if queue in (carried := homes.get(shop.lane.home, ())):
                own = home_queue(shop.lane.home, queue)
                queue = own if own in carried else former_home_queue(shop.lane.home)
            tokens.append((queue, shop.platform.key, hint.priority, hint.due_at if hint.due_at > now else None))
    publish_tokens(tokens)


def home_queue(node: str, queue: str) -> str:
    """What an execution worker of that node consumes beside that queue. One for each: a worker of the node that does
    not serve it could do nothing with the token."""
    return f"n.{node}.{queue}"


def former_home_queue(node: str) -> str:
    """The only one of a node that was not upgraded yet, and what publishers that were not send to."""
    return f"n.{node}"


def further_queues() -> list[str]:
    """Those besides the shared ones: of shops and platforms that have their own, and of nodes that live."""
    found = sql.rows(
        """
        SELECT 's.' || platform.key || '.' || shop.shop_id
        FROM rpa_tasks_shop AS shop JOIN rpa_tasks_platform AS platform ON platform.id = shop.platform_id
        WHERE shop.dedicated_queue AND shop.retired_at IS NULL AND platform.retired_at IS NULL
        UNION ALL
        SELECT 'p.' || key || '.' || tier.name
        FROM rpa_tasks_platform CROSS JOIN unnest(%(tiers)b::text[]) AS tier(name)
        WHERE dedicated_queue AND retired_at IS NULL
        UNION ALL
        SELECT DISTINCT queue.name
        FROM rpa_tasks_executionnode AS node CROSS JOIN jsonb_array_elements_text(node.queues) AS queue(name)
        WHERE node.seen_at > statement_timestamp() - %(lease)s AND starts_with(queue.name, 'n.')
        """,
        {"tiers": list(TIERS.values()), "lease": HOME_LEASE},
    )
    return [name for (name,) in found]


def _homes(nodes: set[str]) -> dict[str, list[str]]:
    """The queues of those of these nodes that live."""
    if not nodes:
        return {}
    living = ExecutionNode.objects.filter(name__in=nodes, seen_at__gt=Now() - HOME_LEASE)
    return dict(living.values_list("name", "queues"))


def publish_tokens(tokens: Iterable[tuple[str, str, int, datetime | None]]) -> None:
    """Each token: queue, platform, priority, and when it is due (None: now)."""
    if alarm.is_on():
        log.warning("tokens_lost", error="the broker takes no messages")
        return
    try:
        with current_app.producer_pool.acquire(block=True, timeout=1) as producer, producer.batch(max_size=200):
            for queue, platform, priority, eta in tokens:
                current_app.send_task(
                    WAKE, eta=eta, producer=producer, headers=published_now(), **_address(queue, platform, priority)
                )
    except Exception as error:
        log.warning("tokens_lost", error=str(error))


def publish_tokens_to(queue: str, count: int) -> None:
    """Tokens for a queue, whatever they are about."""
    priority = next((tier for tier, name in TIERS.items() if queue.endswith(name)), 1)
    publish_tokens((queue, "any", priority, None) for _ in range(count))


def _address(queue: str, platform: str, priority: int) -> dict[str, Any]:
    if queue in TIERS.values() and str(current_app.conf.broker_url).startswith(("amqp", "pyamqp")):
        return {"exchange": "tasks", "routing_key": f"task.{platform.replace('.', '-')}.{TIERS[priority]}"}
    return {"queue": queue}


def ring_for_shops(shop_pks: Iterable[int]) -> None:
    """A gate of these shops has opened: publish a token for each that has work which is due."""
    found = sql.rows(
        """
        SELECT shop.id, head.task_id, head.due_at, head.priority
        FROM unnest(%(shops)b::bigint[]) AS shop(id)
        CROSS JOIN LATERAL (
            SELECT task_id, due_at, priority FROM rpa_tasks_job
            WHERE shop_id = shop.id AND state IN ('scheduled', 'queued') AND parked = ''
              AND due_at <= statement_timestamp()
            ORDER BY priority, due_at LIMIT 1
        ) AS head
        """,
        {"shops": list(shop_pks)},
    )
    doorbell.ring([Hint(task_id, due_at, priority, shop_id) for shop_id, task_id, due_at, priority in found])


doorbell = Doorbell(announce)
