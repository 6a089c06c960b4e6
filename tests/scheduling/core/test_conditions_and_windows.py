"""Conditions, variants and send windows from the event to the send."""

from datetime import UTC, datetime, time, timedelta
from zoneinfo import ZoneInfo

import pytest

from scheduling.ids import new_id
from scheduling.models import Calendar, Customer, CustomerProfile, Node, Template, Touch
from scheduling.operations.preview import preview_event
from scheduling.planning.ingest import NewEvent, record_events
from scheduling.planning.rescheduling import count_failing
from scheduling.policy.node_conditions import compile_condition
from scheduling.policy.send_times import parse_window_line
from tests.scheduling.core.conftest import deliver_when_due, pass_time
from tests.support.touch_logs import list_verdicts

pytestmark = pytest.mark.django_db(transaction=True)
SHANGHAI = ZoneInfo("Asia/Shanghai")
WORKING_HOURS = {"days": ["working"], "from": "09:00", "to": "18:00"}


def when(field, op, value=None):
    row = {"field": field, "op": op}
    return {"all": [row if value is None else {**row, "value": value}]}


def test_event_below_the_amount_plans_nothing(matrix, record_event):
    matrix.node(trigger="order.paid", when=when("event.data.total", "gte", 500))
    assert record_event("order.paid", data={"total": 499}).task_ids == ()
    assert record_event("order.paid", data={}).task_ids == ()
    assert len(record_event("order.paid", data={"total": "500.00"}).task_ids) == 1


def test_first_order_condition_counts_stored_events_and_those_of_the_batch(shop):
    shop.node(trigger="order.paid", when=when("customer.events.order.paid.count", "eq", 0))
    batch = [NewEvent("shop", f"o{number}", "order.paid", user) for number, user in enumerate(["ann", "ann", "bob"])]
    assert [len(each.task_ids) for each in record_events(batch)] == [1, 0, 1]
    assert [each.duplicate for each in record_events(batch)] == [True] * 3
    assert shop.record_event("order.paid", "bob").task_ids == ()
    assert len(shop.record_event("order.paid", "cat").task_ids) == 1


def test_first_order_is_still_sent_after_a_second_order(matrix, record_event):
    matrix.node(trigger="order.paid", when=when("customer.events.order.paid.count", "eq", 0))
    (task_id,) = record_event("order.paid").task_ids
    record_event("order.paid")
    assert [row.state for row in deliver_when_due(task_id)] == ["delivered"]


def test_events_count_that_occurred_within_ninety_days(matrix, record_event):
    """By when they occurred, also in the batch and at the send."""
    matrix.node(trigger="order.paid", when=when("customer.events.material.downloaded.count", "eq", 1))
    now = datetime.now(UTC)
    old, recent = now - timedelta(days=91), now - timedelta(days=89)
    record_event(occurred_at=old)
    assert record_event("order.paid").task_ids == ()
    assert len(record_event("order.paid", occurred_at=old + timedelta(days=1)).task_ids) == 1
    record_event(occurred_at=recent)
    (task_id,) = record_event("order.paid").task_ids
    record_event(occurred_at=recent)
    (verdict,) = deliver_when_due(task_id)[0].verdicts
    assert verdict.decision == "send"
    assert record_event("order.paid").task_ids == ()
    batch = [
        NewEvent("shop", "a", "material.downloaded", "bob", occurred_at=old),
        NewEvent("shop", "b", "material.downloaded", "bob", occurred_at=recent),
        NewEvent("shop", "c", "order.paid", "bob"),
    ]
    assert [len(each.task_ids) for each in record_events(batch)] == [0, 0, 1]


def test_condition_reads_type_source_and_locale(matrix, record_event):
    Customer.objects.create(user_id="ann", locale="en")
    matrix.node(when={"all": [
        {"field": "event.type", "op": "starts_with", "value": "material."},
        {"field": "event.source", "op": "eq", "value": "shop"},
        {"field": "customer.locale", "op": "eq", "value": "en"},
    ]})  # fmt: skip
    events = [
        NewEvent(source, str(new_id()), "material.downloaded", user)
        for source, user in [("shop", "ann"), ("web", "ann"), ("shop", "bob")]
    ]
    receipts = record_events(events)
    assert [len(each.task_ids) for each in receipts] == [1, 0, 0]
    assert deliver_when_due(*receipts[0].task_ids)[0].state == "delivered"


def test_impact_of_a_condition_reads_type_source_and_locale(matrix, record_event):
    Customer.objects.create(user_id="ann", locale="zh-hans")
    node = matrix.node()
    for _ in range(2):
        record_event(source="crm")
    values = {"event.type": "material.downloaded", "event.source": "crm", "customer.locale": "zh-hans"}
    for field, value in values.items():
        judged = {op: count_failing(node.pk, compile_condition(when(field, op, value))) for op in ("eq", "ne")}
        assert judged == {"eq": (2, 0), "ne": (2, 2)}, field


def test_condition_that_no_longer_holds_suppresses_with_its_figures(shop):
    Customer.objects.create(user_id="ann", level="vip")
    shop.node(when=when("customer.level", "eq", "vip"))
    (task_id,) = shop.record_event().task_ids
    Customer.objects.update(level="normal")
    assert [(row.state, row.reason) for row in deliver_when_due(task_id)] == [("suppressed", "condition")]
    (verdict,) = list_verdicts()
    assert (verdict.rule, verdict.observed, verdict.limit) == ("condition", "normal", "customer.level eq vip")


def test_condition_reads_attributes_and_tags_at_planning_and_sending(shop):
    customer = Customer.objects.create(user_id="ann")
    shop.node(when={"all": [
        {"field": "customer.tags", "op": "contains", "value": "tea"},
        {"field": "customer.attributes.age", "op": "gte", "value": 18},
    ]})  # fmt: skip
    assert shop.record_event().task_ids == ()
    CustomerProfile.objects.create(customer=customer, attributes={"age": 30}, tags=["tea"])
    kept, lost = (shop.record_event().task_ids[0] for _ in range(2))
    assert deliver_when_due(kept)[0].state == "delivered"
    CustomerProfile.objects.update(tags=[])
    assert [(row.state, row.reason) for row in deliver_when_due(lost)] == [("suppressed", "condition")]


def test_first_variant_that_holds_gives_the_content(matrix, record_event):
    for key in ("gold", "big"):
        matrix.template(key, content_type=key)
    matrix.node(
        variants=[
            {"key": "gold", "template": "gold", "when": when("customer.level", "eq", "gold")},
            {"key": "big", "template": "big", "when": when("event.data.total", "gte", 100)},
        ]
    )
    Customer.objects.create(user_id="gil", level="gold")
    sent = [
        deliver_when_due(*record_event(user=user, data={"total": total}).task_ids)[0].template.key
        for user, total in [("gil", 500), ("ann", 500), ("bob", 5)]
    ]
    assert sent == ["gold", "big", "guide"]


def test_variant_of_a_deleted_template_is_left_out(matrix, record_event):
    matrix.template("gold")
    matrix.node(variants=[{"key": "gold", "template": "gold", "when": when("event.data.total", "absent")}])
    Template.objects.filter(key="gold").delete()
    assert deliver_when_due(*record_event().task_ids)[0].template.key == "guide"


def test_touch_is_due_at_the_time_of_the_customers_zone(matrix, record_event):
    matrix.node(delay=timedelta(0), at=time(10), at_day="next")
    Customer.objects.create(user_id="ann", timezone="America/New_York")
    (task_id,) = record_event(occurred_at=datetime(2026, 3, 7, 20, tzinfo=UTC)).task_ids
    due_at = Touch.objects.get(pk=task_id).due_at.astimezone(ZoneInfo("America/New_York"))
    assert f"{due_at:%Y-%m-%d %H}" == "2026-03-08 10"  # the clocks changed in that night
    (other,) = record_event(user="bob", occurred_at=datetime(2026, 3, 7, 20, tzinfo=UTC)).task_ids
    assert f"{Touch.objects.get(pk=other).due_at.astimezone(SHANGHAI):%Y-%m-%d %H}" == "2026-03-09 10"


def test_closed_window_holds_a_due_touch_until_it_opens(matrix, record_event):
    node = matrix.node(delay=timedelta(0))
    (task_id,) = record_event().task_ids
    opens = datetime.now(SHANGHAI) + timedelta(hours=3)
    begin = opens.replace(minute=0, second=0, microsecond=0)
    end = "24:00" if begin.hour > 21 else f"{begin.hour + 2:02}:00"
    Node.objects.filter(pk=node.pk).update(send_window=[parse_window_line(f"daily {begin.hour:02}:00-{end}")])
    (row,) = deliver_when_due(task_id)
    assert (row.state, row.reason) == ("scheduled", "send_window")
    assert timedelta(0) <= row.due_at - begin < timedelta(minutes=10)
    (verdict,) = list_verdicts()
    assert (verdict.decision, verdict.rule) == ("hold", "send_window")
    Node.objects.filter(pk=node.pk).update(send_window=[])
    pass_time(hours=4)
    assert deliver_when_due(task_id)[0].state == "delivered"


def test_default_windows_apply_to_nodes_without_own_ones(matrix, record_event):
    Calendar.objects.create(key="china", send_window=[WORKING_HOURS])
    for key, changes in {"default": {}, "always": {"send_window": []}}.items():
        matrix.node(key, delay=timedelta(0), **changes)
    occurred_at = datetime(2026, 10, 1, 4, tzinfo=UTC)  # National Day
    ids = record_event(occurred_at=occurred_at).task_ids
    due = {row.node.key: row.due_at for row in Touch.objects.filter(pk__in=ids)}
    assert due["always"] == occurred_at
    opening = datetime(2026, 10, 8, 9, tzinfo=SHANGHAI)
    assert opening <= due["default"] < opening + timedelta(minutes=10)


def test_preview_explains_the_instant_and_the_node_that_plans_nothing(matrix):
    matrix.node("late", delay=timedelta(hours=1), at=time(10), at_day="next_working")
    matrix.node("big", when=when("event.data.total", "gte", 500))
    event = NewEvent("shop", "1", "material.downloaded", "ann", occurred_at=datetime(2026, 9, 30, 3, tzinfo=UTC))
    late, big = sorted(preview_event(event), key=lambda each: -each.planned)
    matrix.node("open", delay=timedelta(minutes=10), send_window=[WORKING_HOURS])
    *_, opening = preview_event(event)
    assert [what for what, _ in late.steps] == ["delay", "at"]
    assert [f"{at.astimezone(SHANGHAI):%m-%d %H:%M}" for _, at in late.steps[:2]] == ["09-30 12:00", "10-08 10:00"]
    assert [what for what, _ in opening.steps] == ["delay"], "11:10 is inside the window"
    assert (big.planned, big.verdict.rule, big.verdict.observed) == (False, "condition", "absent")
