"""An edited delay and the touches that wait already."""

from datetime import UTC, datetime, timedelta
from io import StringIO

import pytest
from django.core.management import call_command

from scheduling.ids import new_id
from scheduling.ledger import locks
from scheduling.models import Customer, EventType, HarassmentRule, Holdout, Node, Touch
from scheduling.planning import rescheduling

HOUR = timedelta(hours=1)


@pytest.fixture
def start_touch(apply, base_config, record_event):
    """Apply a configuration with a delay of 2 h. Call it to create a touch whose event happened so long ago."""
    EventType.objects.create(key="material.downloaded")
    apply(base_config.replace("15m", "2h"))

    def touch(user, ago, **changes):
        receipt = record_event(user=user, occurred_at=datetime.now(UTC) - ago, **changes)
        return Touch.objects.get(pk=receipt.task_ids[0])

    return touch


def delay_of(touch):
    """How long after its event a touch is due."""
    touch.refresh_from_db()
    return touch.due_at - touch.event.occurred_at


def test_move_waiting_spreads_overdue_touches(apply, base_config, start_touch):
    young = start_touch("ann", HOUR / 4)
    old = [start_touch(f"user-{number}", HOUR) for number in range(20)]
    said = apply(base_config.replace("15m", "30m"), "--move-waiting")
    now = datetime.now(UTC)
    assert said.endswith("applied\n21 waiting touches moved, 20 overdue ones spread over 10m\n")
    assert delay_of(young) == HOUR / 2
    assert young.expires_at - young.due_at == timedelta(days=3)
    for touch in old:
        touch.refresh_from_db()
    assert all(now - timedelta(seconds=30) <= touch.due_at <= now + rescheduling.SPREAD for touch in old)
    assert max(touch.due_at for touch in old) - min(touch.due_at for touch in old) > rescheduling.SPREAD / 3
    assert all(touch.expires_at - touch.due_at == timedelta(days=3) for touch in old)
    assert {touch.state for touch in old} == {"scheduled"}


def test_edited_delay_moves_waiting_touches_only_when_asked(apply, base_config, start_touch):
    young, old = start_touch("ann", HOUR / 4), start_touch("ben", HOUR)
    edited = base_config.replace("15m", "30m")
    waiting = (
        "node presale-download (changed): 2 waiting touches; with --move-waiting 2 would move, 1 of them overdue then\n"
    )
    assert waiting in apply(edited, "--move-waiting", "--dry-run")
    assert waiting in apply(edited)
    assert (delay_of(young), delay_of(old)) == (2 * HOUR, 2 * HOUR)
    assert apply(edited, "--move-waiting") == ("no changes\n2 waiting touches moved, 1 overdue ones spread over 10m\n")
    assert delay_of(young) == HOUR / 2
    spread = delay_of(old)
    assert apply(edited, "--move-waiting") == "no changes\n0 waiting touches moved\n"
    assert delay_of(old) == spread


def test_move_waiting_skips_started_and_retried_and_shortens_no_deferral(apply, base_config, start_touch):
    running, ended, tried, again = (start_touch(name, HOUR / 4) for name in ("ann", "ben", "eve", "dan"))
    Touch.objects.filter(pk=running.pk).update(state="running", lease_no=1, lease_until=datetime.now(UTC) + HOUR)
    Touch.objects.filter(pk=ended.pk).update(state="delivered", settled_at=datetime.now(UTC))
    Touch.objects.filter(pk=tried.pk).update(attempt=1)
    Touch.objects.filter(pk=again.pk).update(retry_of=ended.pk)
    held = start_touch("fay", HOUR)
    Touch.objects.filter(pk=held.pk).update(due_at=held.due_at + HOUR)
    for delay, held_for in (("30m", 3 * HOUR), ("5h", 5 * HOUR)):
        apply(base_config.replace("15m", delay), "--move-waiting")
        assert {delay_of(each) for each in (running, ended, tried, again)} == {2 * HOUR}
        assert delay_of(held) == held_for


def test_move_waiting_leaves_a_touch_that_is_tried_before_its_lock(apply, base_config, start_touch, monkeypatch):
    """Its retry went three days late, or before the time that its receiver had named."""
    tried, lock = start_touch("ann", HOUR / 4), locks.lock_customers_of_touches

    def lock_after_a_try(task_ids):
        Touch.objects.filter(pk=tried.pk).update(attempt=1)
        return lock(task_ids)

    monkeypatch.setattr(locks, "lock_customers_of_touches", lock_after_a_try)
    apply(base_config.replace("15m", "5h"), "--move-waiting")
    assert delay_of(tried) == 2 * HOUR


@pytest.mark.parametrize(("paused_by", "shown"), [("", ""), ("all", "paused")])
def test_moved_touch_waits_for_its_new_time_alone(apply, base_config, start_touch, paused_by, shown):
    """It was shown and counted as one that waits for a quota slot, and its cancellation gave back another's slot."""
    waiting = start_touch("ann", HOUR)
    reason = "paused" if paused_by else "quota"
    Touch.objects.filter(pk=waiting.pk).update(due_at=waiting.due_at + HOUR, reason=reason, paused_by=paused_by)
    apply(base_config.replace("15m", "5h"), "--move-waiting")
    assert delay_of(waiting) == 5 * HOUR
    assert (waiting.reason, waiting.paused_by) == (shown, paused_by)


def test_node_that_is_added_during_the_move_stops_nothing(apply, base_config, start_touch, monkeypatch):
    touch, read = start_touch("ann", HOUR), rescheduling.current

    def read_before_another_edit():
        found, node = read(), Node.objects.get(key="presale-download")
        if node.delay == 5 * HOUR:
            node.pk, node.key = None, f"node-{new_id()}"
            node.save()
        return found

    monkeypatch.setattr(rescheduling, "current", read_before_another_edit)
    apply(base_config.replace("15m", "5h"), "--move-waiting")
    assert delay_of(touch) == 5 * HOUR


def test_move_waiting_batches_cover_all(apply, base_config, start_touch, monkeypatch):
    monkeypatch.setattr(rescheduling, "BATCH", 3)
    touches = [start_touch(f"user-{number}", HOUR / 4) for number in range(10)]
    assert apply(base_config.replace("15m", "1h"), "--move-waiting").endswith("\n10 waiting touches moved\n")
    assert {delay_of(touch) for touch in touches} == {HOUR}


def test_move_waiting_applies_the_time_scale(apply, base_config, start_touch, settings):
    touch = start_touch("ann", timedelta(minutes=1))
    settings.AFTERTOUCH_TIME_SCALE = 2
    apply(base_config.replace("15m", "1h"), "--move-waiting")
    assert delay_of(touch) == HOUR / 2


DYNAMIC = "delay_rules: {by_level: {vip: 2h}, default: 10h, active_within: 24h, active_factor: 0.5}\n"


def test_move_waiting_dynamic_uses_earlier_activity(apply, base_config, record_event):
    EventType.objects.create(key="material.downloaded")
    base_config = base_config.replace("delay: 15m", "dynamic: true")
    apply(base_config + DYNAMIC)
    Customer.objects.create(user_id="vip", level="vip")
    now = datetime.now(UTC)
    record_event("order.paid", "active", occurred_at=now - 3 * HOUR)
    touches = {}
    for user in ("vip", "active", "stranger"):
        receipt = record_event(user=user, occurred_at=now - HOUR / 2)
        touches[user] = Touch.objects.get(pk=receipt.task_ids[0])
    assert [delay_of(touches[user]) for user in touches] == [2 * HOUR, 5 * HOUR, 10 * HOUR]
    said = apply(DYNAMIC.replace("2h", "4h").replace("10h", "20h"), "--move-waiting")
    assert (
        "node presale-download (changed): 3 waiting touches; with --move-waiting 3 would move, 0 of them overdue"
        in said
    )
    assert [delay_of(touches[user]) for user in touches] == [4 * HOUR, 10 * HOUR, 20 * HOUR]


def test_rule_edit_keeps_nodes_with_own_rules(apply, base_config, record_event):
    EventType.objects.create(key="material.downloaded")
    base_config = base_config.replace("delay: 15m", "dynamic: true, delay_rules: {default: 3h}")
    apply(base_config + DYNAMIC)
    touch = Touch.objects.get(pk=record_event().task_ids[0])
    said = apply(base_config + DYNAMIC.replace("10h", "20h"), "--move-waiting")
    assert "node presale-download" not in said
    assert delay_of(touch) == 3 * HOUR
    assert apply(base_config.replace("3h", "4h"), "--move-waiting").endswith("\n1 waiting touch moved\n")
    assert delay_of(touch) == 4 * HOUR


def test_impact_covers_conditions_rules_and_the_holdout(apply, base_config, start_touch):
    start_touch("ann", HOUR)
    start_touch("bob", HOUR)
    Customer.objects.filter(user_id="ann").update(level="vip")
    Node.objects.update(when={"all": [{"field": "customer.level", "op": "eq", "value": "vip"}]})
    for scope in ("user", "community"):
        HarassmentRule.objects.create(kind="cap", scope=scope, limit=3, window=HOUR)
    Holdout.objects.create(pk=1, percent=99.99)
    exported = StringIO()
    call_command("export_config", stdout=exported)
    Node.objects.update(when={})
    HarassmentRule.objects.all().delete()
    Holdout.objects.all().delete()
    said = apply(exported.getvalue(), "--dry-run")
    assert "node presale-download (changed): 2 waiting touches; 1 of 2 would not meet the condition now\n" in said
    assert "rule cap (user) (added): 2 waiting touches\n" in said
    assert "global hold-out (added): 2 waiting customers inside the share\n" in said
    assert "node presale-download (retired): 2 waiting touches\n" in apply("nodes: []", "--dry-run")


def test_queries_of_the_impact_do_not_grow_with_nodes(apply, base_config, start_touch, django_assert_max_num_queries):
    start_touch("ann", HOUR)
    stage, template, channel = (getattr(Node.objects.get(), name) for name in ("stage", "template", "channel"))
    Node.objects.bulk_create(
        Node(key=f"n-{number}", stage=stage, template=template, channel=channel, trigger="order.paid")
        for number in range(50)
    )
    with django_assert_max_num_queries(40):
        apply("nodes: []", "--dry-run")
