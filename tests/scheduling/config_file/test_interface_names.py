"""The names of nodes, calendars and rules that other programs rely on, applied as they are published."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from scheduling.configuration import snapshot
from scheduling.models import Calendar, HarassmentRule, Holdout, Node
from scheduling.policy.node_conditions import MOST_ROWS

pytestmark = pytest.mark.django_db

CONFIGURATION = """
version: 1
channels: [{key: log, kind: log}, {key: sms, kind: log}]
templates:
  - {key: guide, content_type: guide, category: service, body: hello}
  - {key: gold, content_type: guide, category: service, body: dear customer}
stages: [{key: presale, name: 售前}]
calendars: [{key: china, country: CN, closed: ["2026-10-01"], open: ["2026-10-10"]}]
nodes:
  - key: big-order
    stage: presale
    trigger: order.paid
    template: guide
    channel: log
    tags: [sale]
    when: {all: [{field: event.data.amount, op: gte, value: 500},
                 {any: [{field: customer.tags, op: contains, value: vip},
                        {field: customer.attributes.city, op: in, value: [上海, 杭州]}]}]}
    variants: [{key: vips, when: {all: [{field: customer.level, op: eq, value: vip}]}, template: gold}]
    at: "10:00"
    send_window: {days: [mon, tue, wed, thu, fri], from: "10:00", to: "20:00", calendar: china, timezone: customer}
  - {key: after-delivered, trigger: touch.delivered, from_nodes: [big-order], FOLLOWING}
  - {key: after-failed, trigger: touch.failed, from_nodes: [big-order], FOLLOWING}
  - {key: after-suppressed, trigger: touch.suppressed, from_nodes: [big-order], FOLLOWING}
  - {key: after-clicked, trigger: touch.clicked, from_nodes: [big-order], FOLLOWING}
  - {key: after-replied, trigger: touch.replied, from_nodes: [big-order, after-clicked], FOLLOWING}
harassment_rules:
  - {kind: cap, scope: user, limit: 3, limits: {vip: 5}, window: 24h, channel: sms, category: marketing, tag: sale}
  - {kind: cap, scope: community, limit: 3, window: 24h}
  - {kind: dedupe, scope: user, by: content_type, window: 72h}
  - {kind: dedupe, scope: community, by: content_type, window: 72h}
holdout: {percent: 5}
""".replace("FOLLOWING", "stage: presale, template: guide, channel: log")
OPERATORS = ("eq", "ne", "gt", "gte", "lt", "lte", "contains", "not_contains", "starts_with")
FIELDS = (
    "event.data.amount", "event.type", "event.source", "chat_id", "customer.level", "customer.locale",
    "customer.attributes.city",
)  # fmt: skip


def test_published_examples_round_trip(apply: Callable[..., str], export: Callable[..., str]) -> None:
    apply(CONFIGURATION)
    exported = export()
    assert apply(exported).startswith("no changes\n")
    assert apply(CONFIGURATION).startswith("no changes\n")
    assert export() == exported

    node = Node.objects.get(key="big-order")
    assert node.when["all"][0] == {"field": "event.data.amount", "op": "gte", "value": 500}
    assert [each["key"] for each in node.variants] == ["vips"]
    calendar = Calendar.objects.get()
    assert (calendar.key, calendar.closed, calendar.open) == ("china", ["2026-10-01"], ["2026-10-10"])
    cap = HarassmentRule.objects.filter(kind="cap", scope="user").get()
    assert (cap.limits, cap.channel, cap.category, cap.tag) == ({"vip": 5}, "sms", "marketing", "sale")
    assert Holdout.objects.get().percent == 5
    for name in ("when:", "send_window:", "calendars:", "from_nodes:", "holdout:\n  percent: 5"):
        assert name in exported
    triggered = snapshot.current().triggered
    for end in ("delivered", "failed", "suppressed", "clicked", "replied"):
        (node_spec,) = triggered[f"touch.{end}"]
        assert "big-order" in node_spec.from_nodes


def test_published_operators_apply_to_each_field(apply: Callable[..., str], export: Callable[..., str]) -> None:
    rows = ["{field: customer.events.order.paid.count, op: gte, value: 2}"]
    for field in FIELDS:
        rows += [f"{{field: {field}, op: {op}, value: 5}}" for op in OPERATORS]
        rows += [f"{{field: {field}, op: {op}, value: [a, b]}}" for op in ("in", "not_in")]
        rows += [f"{{field: {field}, op: {op}}}" for op in ("exists", "absent")]
    head, _, rest = CONFIGURATION.partition("    when: ")
    for start in range(0, len(rows), MOST_ROWS):
        when = f"{{all: [{', '.join(rows[start : start + MOST_ROWS])}]}}"
        apply(f"{head}    when: {when}\n    variants:{rest.partition('    variants:')[2]}")
        assert apply(export()).startswith("no changes\n")
