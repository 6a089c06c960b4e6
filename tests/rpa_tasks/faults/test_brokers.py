"""The broker forgets, dies, or is another one: tokens are lost, jobs are not."""

import time
from collections import Counter
from contextlib import contextmanager

import redis
from kombu import Connection, Exchange, Queue

from tests.faults.brokers import rabbitmq
from tests.rpa_tasks.faults.effect_log import find_overlaps
from tests.rpa_tasks.faults.rpa_cluster import PATIENT, TIERS, run_rpa_cluster

SHOPS, EACH = 6, 4


def test_jobs_survive_redis_flush_and_kill(rpa_cluster, report_line):
    market = rpa_cluster.market(SHOPS, act={"idempotent": True})
    with rpa_cluster.node("north", slots=3, times=PATIENT) as north:
        main = north.program.pid
        shown = [
            _run_jobs_through_fault(rpa_cluster, market, name, fault)
            for name, fault in (("FLUSHALL", _flush), ("kill -9", _kill))
        ]
        assert north.program.is_alive()
        assert north.program.pid == main
    assert not find_overlaps(market.log.effects())
    report_line(f"Redis under {SHOPS * EACH} jobs, waiting and running · {' · '.join(shown)} · none lost, none twice")


def _run_jobs_through_fault(cluster, market, name, fault):
    """Jobs run, wait for their shop, and wait for their time."""
    go = market.folder / name
    tasks = [
        market.publish(
            shop, "act", dedupe_key=f"{name}-{number}", delay=(0, 0, 1, 3)[number],
            payload={"until": str(go)} if number == 0 else {},
        )
        for shop in market.shops for number in range(EACH)
    ]  # fmt: skip
    cluster.await_effects(market.log, [tasks[0]])
    fault(cluster)
    struck_at = time.monotonic()
    go.touch()
    cluster.wait(lambda: not cluster.unsettled(tasks), "all jobs end", 240, 0.1)
    assert {cluster.job(task)["state"] for task in tasks} == {"succeeded"}
    assert [len(market.log.of(task)) for task in tasks] == [1] * len(tasks)
    return f"{name}: all ended {time.monotonic() - struck_at:.1f} s after it"


def _flush(cluster):
    with redis.Redis.from_url(cluster.stack.endpoints.redis_url) as client:
        client.flushall()


def _kill(cluster):
    killed = cluster.stack.kill("Valkey")
    cluster.wait(lambda: cluster.stack.server_pids.get("Valkey", killed) != killed, "Valkey runs again")


def test_rabbitmq_delivers_wakeups_to_shared_and_own_queues(state_folder, report_line):
    home = state_folder("rpa")
    with rabbitmq(home) as broker, run_rpa_cluster(home, env={"CELERY_BROKER_URL": broker.url}) as made:
        plain = made.market(3, act={})
        shop = made.market(1, act={})
        platform = made.market(2, act={})
        made.sql("UPDATE rpa_tasks_shop SET dedicated_queue = true WHERE shop_id = ANY(%s)", [shop.shops])
        made.sql("UPDATE rpa_tasks_platform SET dedicated_queue = true WHERE key = %s", [platform.platform])
        own = [f"s.{shop.platform}.{shop.shops[0]}", *(f"p.{platform.platform}.{tier}" for tier in TIERS.split(","))]
        with (
            made.node("shared", times=PATIENT) as shared,
            made.node("dedicated", queues=",".join(own), times=PATIENT) as dedicated,
            _record_routing_keys(broker.url) as heard,
        ):
            assert shared.program.is_alive()
            assert dedicated.program.is_alive()
            began_at = time.monotonic()
            tasks = {
                market.publish(name, "act", priority=priority, dedupe_key=str(priority)): market.platform
                for market in (plain, shop, platform) for name in market.shops for priority in (0, 1, 2)
            }  # fmt: skip
            made.wait(lambda: not made.unsettled(list(tasks)), "all jobs end", 240)
            took = time.monotonic() - began_at
            rows = [made.job(task) for task in tasks]
            keys = Counter(heard())
    assert {row["state"] for row in rows} == {"succeeded"}
    assert {(tasks[str(row["task_id"])] == plain.platform, row["node"]) for row in rows} == {
        (True, "shared"), (False, "dedicated"),
    }  # fmt: skip
    for market in (plain, shop, platform):
        assert not find_overlaps(market.log.effects())
    # A token is published only for a slot that is idle, so a busy node gets wake-ups for few of its nine jobs.
    shared_keys = {f"task.{about}.{tier}" for about in (plain.platform, "any") for tier in TIERS.split(",")}
    own_keys = {
        f"task.{shop.platform}.{shop.shops[0]}",
        *(f"own.{platform.platform}.{tier}" for tier in TIERS.split(",")),
    }
    assert keys[f"task.{plain.platform}.high"] >= 1, keys
    assert keys.keys() & own_keys, keys
    assert set(keys) <= shared_keys | own_keys, keys
    tiers = sorted({key.rpartition(".")[2] for key in keys})
    report_line(
        f"RabbitMQ · {len(rows)} jobs on all tiers, a shop's and a platform's own queues in {took:.1f} s · "
        f"the exchange tasks carried {sum(keys.values())} tokens: {', '.join(tiers)}"
    )


@contextmanager
def _record_routing_keys(url):
    """Consume all messages of the exchange. Calling it returns the routing keys so far."""
    with Connection(url) as connection:
        exchange = Exchange("tasks", type="topic", durable=True, passive=True)
        queue = Queue("spy", exchange, routing_key="#", exclusive=True)(connection.default_channel)
        queue.declare()

        def heard():
            keys = []
            while message := queue.get(no_ack=True):
                keys.append(str(message.delivery_info["routing_key"]))
            return keys

        yield heard
