"""An export applied again changes nothing. A file applied to an empty database is exported unchanged."""

import pytest
from django.db import transaction
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from config.environment import ROOT
from scheduling.configuration.file import apply as plan
from scheduling.configuration.file.apply import export_document as exported
from scheduling.configuration.file.section import Stamp
from scheduling.models import Community, EventType, Node
from scheduling.policy.node_conditions import MOST_ROWS
from scheduling.strict_text import write_yaml

SHIPPED = ROOT / "scheduling" / "shipped.yaml"

#: Each key of these sections, with values that are not its default. Other programs rely on the names.
EVERYTHING = plan.parse_document(
    """
channels:
  - {key: log, kind: log, idempotent: false, timeout: 1500ms, retry: [1us, 7d]}
  - {key: hook, kind: webhook, url: "https://hooks.example.org/x", secret: whsec_AAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAA,
     idempotent: false, daily_limit: 5, monthly_limit: 50}
templates:
  - {key: guide, content_type: guide, category: service, locale: zh-hans,
     body: "您好\\n- {{ user.name }} ", subject: "# 1"}
  - {key: guide, content_type: guide, category: service, locale: en, body: "no"}
  - {key: gold, content_type: guide, category: marketing, locale: de, body: hi}
communities:
  - {chat_id: c1, name: 一群, targets: {log: {}, webhook: {url: "https://hooks.example.org/y"}}}
  - {chat_id: "22:00", name: "null"}
stages: [{key: presale, name: 售前, position: 7}, {key: insale, name: "010"}, {key: aftersale}]
calendars:
  - {key: china, country: CN, closed: ["2026-10-01"], open: ["2026-10-10"], timezone: Europe/Berlin, send_window: []}
  - {key: own, country: "", send_window: {from: "11:00", to: "16:00"}}
delay_rules: {by_level: {vip: 1h30m}, default: 2h, active_within: 0, active_factor: 0.0625}
holdout: {percent: 12.5, key: "2026"}
nodes:
  - key: first
    stage: presale
    trigger: order.paid
    template: guide
    channel: log
    name: 首次
    delay: 15m
    dynamic: true
    delay_rules: {by_level: {vip: 1s}, default: 0, active_within: 7d, active_factor: 0.5}
    priority: high
    enabled: false
    rollout: {percent: 0.5, communities: [c1]}
    over_cap: defer
    expires_after: 1us
    canary: {template: gold, percent: 100, communities: [c2], guard: {steps: [1, 2.5], time: 1h, touches: 1}}
    cancel_on: [order.paid, x y]
    on_repeat: restart
    goal: {event: order.paid, within: 30d}
    holdout: 5
    tags: [sale]
    guards: {cap: count_only, dedupe: ignore, conversation: ignore, quiet_hours: ignore, holdout: ignore}
    when: {any: [{field: customer.tags, op: exists}, {all: [{field: customer.level, op: in, value: [vip, gold]}]}]}
    variants: [{key: v, template: gold, when: {all: [{field: customer.events.order.paid.count, op: eq, value: 0}]}}]
    not_before: "09:30:01"
    send_window:
      - {days: [mon, tue], from: "9:00", to: "18:00", timezone: customer}
      - {days: [working], from: "10:00", to: "24:00", calendar: china}
  - {key: second, stage: insale, trigger: touch.delivered, from_nodes: [first], template: gold, channel: hook,
     at: "10:00"}
  - {key: third, stage: insale, trigger: x, template: gold, channel: hook, at: "10:00", at_day: working,
     send_window: []}
  - {key: after-failed, stage: insale, trigger: touch.failed, from_nodes: [first], template: gold, channel: hook}
  - {key: after-suppressed, stage: insale, trigger: touch.suppressed, from_nodes: [first], template: gold, channel: log}
  - {key: after-clicked, stage: insale, trigger: touch.clicked, from_nodes: [first], template: gold, channel: hook}
  - {key: after-replied, stage: insale, trigger: touch.replied, from_nodes: [after-clicked, first], template: gold,
     channel: hook}
harassment_rules:
  - {kind: cap, limit: 3, window: 1d, enabled: false, limits: {vip: 9}, channel: log, category: service, tag: sale}
  - {kind: cap, limit: 3, window: 1d}
  - {kind: cap, limit: 5, window: 2d, scope: community}
  - {kind: dedupe, window: 3d, by: content_type, scope: community, tag: sale}
  - {kind: conversation, enabled: false}
  - {kind: quiet_hours, from: "22:00", to: "08:00:30", timezone: Europe/Berlin}
""".encode()
)
#: Keys that stay in each drawn entry. The others come and go.
KEPT_KEYS = {
    "key", "kind", "url", "content_type", "category", "locale", "body", "chat_id", "stage", "trigger", "template",
    "channel", "from_nodes", "at", "default", "limit", "window", "from", "to",
}  # fmt: skip
ALL_ROWS = ("channels", "templates", "stages", "calendars")  #: nodes refer to them


@st.composite
def draw_configs(draw):
    def thin_out(entry):
        optional = sorted(entry.keys() - KEPT_KEYS)
        left_out = draw(st.sets(st.sampled_from(optional))) if optional else set()
        return {name: value for name, value in entry.items() if name not in left_out}

    config = {"version": 1}
    for name, rows in EVERYTHING.items():
        if isinstance(rows, dict):
            config[name] = thin_out(rows)
            continue
        entries = rows if name == "nodes" else draw(st.permutations(rows))  # the second node follows the first
        if name not in ALL_ROWS:
            entries = entries[: draw(st.integers(0, len(entries)))]
        config[name] = [thin_out(entry) for entry in entries]
    return config


def read_document(base_config):
    """Through the text, as a file goes."""
    return plan.parse_document(write_yaml(base_config).encode())


def plan_document(base_config):
    return plan.plan_changes(read_document(base_config))


def apply_document(base_config):
    given = read_document(base_config)
    plan.store_document(given, Stamp("test"), plan.plan_changes(given).confirm)


@pytest.mark.django_db
@settings(max_examples=6, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])
@given(first=draw_configs(), second=draw_configs(), with_secrets=st.booleans())
def test_exported_config_applies_without_change(first, second, with_secrets):
    with transaction.atomic():
        EventType.objects.create(key="order.paid")  # conditions name it
        for base_config in (first, second):
            apply_document(base_config)
            assert plan_document(base_config).changes == []
            assert plan_document(exported(with_secrets=with_secrets)).changes == []
        whole = exported(with_secrets=True)
        transaction.set_rollback(True)
    with transaction.atomic():
        EventType.objects.create(key="order.paid")
        apply_document(whole)
        assert exported(with_secrets=True) == whole
        transaction.set_rollback(True)


def test_shipped_matrix_round_trips(apply, export):
    apply(SHIPPED.read_text(encoding="utf-8"))
    before = export()
    assert "{{ user.name }}，您好！" in before
    assert apply(before).startswith("no changes\n")
    assert export() == before


OPERATORS = ("eq", "ne", "gt", "gte", "lt", "lte", "contains", "not_contains", "starts_with")
FIELDS = (
    "event.data.amount", "event.type", "event.source", "chat_id", "customer.level", "customer.locale",
    "customer.attributes.city",
)  # fmt: skip


def test_published_operators_apply_to_each_field(apply, export, base_config):
    rows = ["{field: customer.events.order.paid.count, op: gte, value: 2}"]
    for field in FIELDS:
        rows += [f"{{field: {field}, op: {op}, value: 5}}" for op in OPERATORS]
        rows += [f"{{field: {field}, op: {op}, value: [a, b]}}" for op in ("in", "not_in")]
        rows += [f"{{field: {field}, op: {op}}}" for op in ("exists", "absent")]
    EventType.objects.create(key="order.paid")
    for start in range(0, len(rows), MOST_ROWS):
        apply(base_config.replace("delay: 15m", f"when: {{all: [{', '.join(rows[start : start + MOST_ROWS])}]}}"))
        assert apply(export()).startswith("no changes\n")


def test_admin_only_values_round_trip(apply, export, base_config):
    apply(base_config)
    row = Node.objects.get()
    row.delay_rules = {"default": 60}
    row.save()
    Community.objects.create(chat_id="c1", targets={"log": {}})
    row.template.texts.all().delete()
    shown = export()
    assert "body: null\n" in shown
    assert apply(shown).startswith("no changes\n")
