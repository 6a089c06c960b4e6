"""Load and remove sample customers with events and touches, to look at the back office before the first real event.

Events go through the intake of real ones, so their touches are planned, judged and sent like all others. Every sample
customer has a tag and one of `USER_IDS`; `remove_samples` deletes these customers and all that belongs to them.
"""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

from django.db import transaction
from django.db.models import QuerySet

from scheduling import sql
from scheduling.customers.changes import CustomerInput, change_customers
from scheduling.errors import Conflict
from scheduling.ledger import locks
from scheduling.ledger.anonymization import delete_touches_of
from scheduling.models import Customer, CustomerProfile, Node
from scheduling.planning.ingest import NewEvent, record_events

SOURCE = TAG = "sample-data"
NAMES = (
    "陈晓", "李明", "王芳", "Ann Lee", "Bob Kim", "赵磊", "孙悦", "周涛", "Eva Sun", "吴敏", "郑凯", "Tom Wu",
)  # fmt: skip
USER_IDS = tuple(f"sample-{number:02}" for number in range(1, len(NAMES) + 1))
#: Types of the shipped nodes, with the hours since they happened.
EVENTS = (
    ("consultation.ended", 20), ("material.downloaded", 16), ("signup.succeeded", 10), ("order.paid", 5),
    ("service.completed", 1),
)  # fmt: skip
#: Kinds of channels that reach no receiver outside.
HARMLESS_KINDS = ("log", "inapp")


def load_samples(*, send: bool = False) -> int:
    """Store the sample customers and their events. Idempotent. Return the number of planned touches.

    Raises:
        Conflict: an enabled node has a channel that reaches receivers, and `send` is not set; or a customer with one
            of `USER_IDS` exists without the tag.
    """
    reaching = Node.objects.filter(enabled=True, retired_at=None).exclude(channel__kind__in=HARMLESS_KINDS)
    if not send and (key := reaching.values_list("key", flat=True).first()):
        raise Conflict(f"Node {key} is enabled and its channel reaches receivers. With --send it gets samples too.")
    known = set(Customer.objects.filter(user_id__in=USER_IDS).values_list("user_id", flat=True))
    if foreign := sorted(known - set(_find_samples().values_list("user_id", flat=True))):
        raise Conflict(f"Customer {foreign[0]} exists and is no sample.")
    people = [
        CustomerInput(user_id, {"name": name, "level": "vip" if place % 4 == 0 else "", "tags": [TAG]})
        for place, (user_id, name) in enumerate(zip(USER_IDS, NAMES, strict=True))
    ]
    change_customers(people, actor=SOURCE)
    now = datetime.now(UTC)
    events = [
        NewEvent(
            SOURCE, f"{user_id}-{kind}", kind, user_id, occurred_at=now - timedelta(hours=hours, minutes=7 * place),
            data={"order_no": f"SAMPLE-{place:04}", "amount": 99 + place},
        )
        for place, user_id in enumerate(USER_IDS)
        for kind, hours in EVENTS
        if (place + hours) % 3
    ]  # fmt: skip
    receipts = record_events(events)
    return sum(len(each.task_ids) for each in receipts if not each.duplicate)


def remove_samples() -> dict[str, int]:
    """Delete the sample customers with their events, touches and failed tasks. Idempotent. Return the numbers.

    Raises:
        Conflict: a worker is sending some of the touches; nothing was deleted.
    """
    with transaction.atomic():
        locked = locks.lock_customers_by_user_id(sorted(_find_samples().values_list("user_id", flat=True)))
        customers = {"ids": [spec.id for spec in locked.values()]}
        events = [
            row[0] for row in sql.rows("SELECT id FROM scheduling_event WHERE customer_id = ANY(%(ids)s)", customers)
        ]
        touches, running = delete_touches_of(events)
        if running:
            raise Conflict(f"{running} sample touches are being sent. Nothing was removed; try again in a minute.")
        for table in ("vendormessage", "deliveryreceipt"):
            statement = f"DELETE FROM scheduling_{table} WHERE delivery_key = ANY(%(keys)b)"  # noqa: S608 (constants)
            sql.execute(statement, {"keys": list(touches)})
        for table in ("complaint", "event", "customerchange", "customerprofile"):
            sql.execute(f"DELETE FROM scheduling_{table} WHERE customer_id = ANY(%(ids)s)", customers)  # noqa: S608
        sql.execute("DELETE FROM scheduling_customer WHERE id = ANY(%(ids)s)", customers)
        return {"customers": len(locked), "events": len(events), "touches": len(touches)}


def _find_samples() -> QuerySet[Customer]:
    profiles = CustomerProfile.objects.filter(tags__contains=[TAG])
    return Customer.objects.filter(user_id__in=USER_IDS, pk__in=profiles.values("pk"))
