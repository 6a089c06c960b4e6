"""Measure outgoing webhooks from stored messages to a receiver that takes 50 ms, from one sender."""

from __future__ import annotations

import time

from benchmarks.environment import Bench, processor_seconds, wait_until
from benchmarks.peers.call import SECRET
from benchmarks.scenarios.webhook import ANSWER_SECONDS, is_answering, read_counts, request_receiver
from config.local.processes import select_port

GOAL = 2_000.0


def outbox(bench: Bench) -> None:
    count = bench.size(20_000, 3_000)
    for _ in range(bench.repeat):
        port = select_port()
        url = f"http://127.0.0.1:{port}/"
        with bench.running("benchmarks.receiver", str(port), str(ANSWER_SECONDS)):
            wait_until(lambda url=url: is_answering(url), 20, "the receiver")
            _measure_outbox(bench, url, count)


def _measure_outbox(bench: Bench, url: str, count: int) -> None:
    from scheduling import sql
    from scheduling.ids import new_id
    from scheduling.models import WebhookMessage, WebhookSubscription
    from scheduling.webhooks import Occurrence, OutboxSender, write_messages

    WebhookMessage.objects.all().delete()
    WebhookSubscription.objects.all().delete()
    config = {"url": f"{url}hook", "secret": SECRET}
    hook = WebhookSubscription.objects.create(key="bench", config=config, events=["touch.ended"])
    at = sql.now()
    data = {"state": "delivered", "node": "presale-download", "user_id": "ann", "chat_id": "c1", "reason": ""}
    write_messages(
        (hook.pk, Occurrence(task_id, "touch.ended", f"touch:{task_id}", at, data | {"task_id": str(task_id)}))
        for task_id in (new_id() for _ in range(count))
    )
    request_receiver(url, "DELETE")
    own, database = time.process_time(), processor_seconds([bench.servers["PostgreSQL"]])
    OutboxSender(0).run()
    own, database = time.process_time() - own, processor_seconds([bench.servers["PostgreSQL"]]) - database
    found = read_counts(url)
    add = bench.figures.add
    note = f"{count:,} to one receiver that takes {ANSWER_SECONDS * 1000:.0f} ms, one sender"
    add("outbox", "received", found["count"] / (found["last_at"] - found["first_at"]), "/s",
        goal=GOAL, at_least=True, note=note)  # fmt: skip
    add("outbox", "processor time of the sender for each message", own / count * 1e6, "µs")
    add("outbox", "processor time of PostgreSQL for each message", database / count * 1e6, "µs")
    add("outbox", "received twice", found["twice"], "messages", goal=0)
    add("outbox", "not received", count - found["count"] + found["twice"], "messages", goal=0)
