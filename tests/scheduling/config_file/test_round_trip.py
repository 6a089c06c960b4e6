"""An export applied again changes nothing. A file applied to an empty database is exported unchanged."""

from __future__ import annotations

from collections.abc import Callable
from datetime import date, timedelta
from typing import Any

import pytest
from django.db import transaction
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from config.environment import ROOT
from scheduling.configuration.file import apply as plan
from scheduling.configuration.file.apply import export_document as exported
from scheduling.configuration.file.section import Stamp
from scheduling.durations import YEAR, format_duration
from scheduling.models import Community, EventType, Node
from scheduling.strict_text import write_yaml

Apply = Callable[..., str]
SHIPPED = ROOT / "scheduling" / "shipped.yaml"

words = st.text(st.characters(exclude_characters="\0{}%#", exclude_categories=["Cs"]), min_size=1, max_size=30).filter(
    lambda text: text.strip()
)
keys = st.from_regex(r"[a-z0-9][a-z0-9_.-]{0,20}", fullmatch=True)
flags = st.booleans()
percents = st.integers(0, 100) | st.floats(0, 100)
factors = st.floats(0.01, 10)
locales = st.sampled_from(["zh-hans", "en", "de", "zh-hant"])


def spans(least: timedelta = timedelta(0), most: timedelta = YEAR) -> st.SearchStrategy[str]:
    return st.timedeltas(min_value=least, max_value=most).map(format_duration)


some_time = spans(timedelta(microseconds=1))
clocks = st.times().map(lambda each: each.replace(microsecond=0).isoformat())
chats = st.lists(words, unique=True, max_size=3)
delay_rules = st.fixed_dictionaries(
    {"default": spans()},
    optional={
        "by_level": st.dictionaries(words, spans(), max_size=3),
        "active_within": spans(),
        "active_factor": factors,
    },
)


limits = st.integers(0, 100) | st.sampled_from([0.5, 1.25, 0.0625])
canary_guards = st.fixed_dictionaries(
    {},
    optional={
        "steps": st.lists(st.integers(1, 99), unique=True, min_size=1, max_size=5).map(sorted),
        "time": spans(),
        "touches": st.integers(1, 10_000),
        "failures": limits,
        "complaints": limits,
    },
)


def listed(entries: st.SearchStrategy[dict[str, Any]], by: str = "key", most: int = 4) -> st.SearchStrategy[Any]:
    return st.lists(entries, max_size=most, unique_by=lambda entry: entry[by])


channels = listed(
    st.fixed_dictionaries(
        {"key": keys, "kind": st.just("log")},
        optional={
            "idempotent": flags,
            "timeout": spans(timedelta(microseconds=1), timedelta(seconds=20)),
            "retry": st.lists(spans(timedelta(microseconds=1), timedelta(days=7)), max_size=4),
        },
    )
    | st.fixed_dictionaries(
        {"key": keys, "kind": st.just("webhook"), "url": st.just("https://hooks.example.org/x")},
        optional={"secret": st.just("whsec_" + "A" * 32), "idempotent": flags},
    )
)
communities = listed(
    st.fixed_dictionaries(
        {"chat_id": words, "name": words},
        optional={
            "targets": st.fixed_dictionaries(
                {}, optional={"log": st.just({}), "webhook": st.just({"url": "https://hooks.example.org/y"})}
            )
        },
    ),
    by="chat_id",
)
stages = listed(st.fixed_dictionaries({"key": keys}, optional={"name": words, "position": st.integers(0, 99)}))


@st.composite
def templates(draw: st.DrawFn) -> list[dict[str, Any]]:
    entries = []
    for key in draw(st.lists(keys, unique=True, min_size=1, max_size=4)):
        common = {"key": key, "content_type": draw(words), "category": draw(st.sampled_from(["marketing", "service"]))}
        for locale in draw(st.lists(locales, unique=True, min_size=1, max_size=3)):
            text = draw(st.fixed_dictionaries({"body": words}, optional={"subject": words}))
            entries.append({**common, "locale": locale, **text})
    return entries


condition_rows = st.sampled_from([
    {"field": "event.data.total", "op": "gte", "value": 500},
    {"field": "customer.level", "op": "in", "value": ["vip", "gold"]},
    {"field": "customer.tags", "op": "exists"},
    {"field": "customer.attributes.城市", "op": "eq", "value": "杭州"},
    {"field": "customer.events.order.paid.count", "op": "eq", "value": 0},
])  # fmt: skip
joins = st.sampled_from(["all", "any"])
condition_groups = st.dictionaries(joins, st.lists(condition_rows, min_size=1, max_size=3), min_size=1, max_size=1)
conditions = st.dictionaries(
    joins, st.lists(condition_rows | condition_groups, min_size=1, max_size=3), min_size=1, max_size=1
)
some_windows = st.sampled_from([
    {"days": ["mon", "tue", "wed", "thu", "fri"], "from": "9:00", "to": "18:00", "timezone": "customer"},
    {"days": ["working"], "from": "10:00", "to": "24:00", "timezone": "Europe/Berlin"},
    {"from": "11:00", "to": "16:00"},
])  # fmt: skip
windows = st.lists(some_windows, max_size=3) | some_windows
calendars = st.fixed_dictionaries(
    {"key": keys},
    optional={
        "timezone": st.sampled_from(["Asia/Shanghai", "Europe/Berlin"]),
        "country": st.sampled_from(["CN", "", "DE"]),
        "send_window": windows,
        "closed": st.lists(st.dates(date(2020, 1, 1), date(2029, 12, 31)).map(str), unique=True, max_size=3),
        "open": st.lists(st.dates(date(2030, 1, 1)).map(str), unique=True, max_size=3),
    },
)


def node(stage: list[str], template: list[str], channel: list[str]) -> st.SearchStrategy[dict[str, Any]]:
    switches = st.sampled_from(["apply", "ignore"])
    return st.fixed_dictionaries(
        {
            "key": keys,
            "stage": st.sampled_from(stage),
            "trigger": words,
            "template": st.sampled_from(template),
            "channel": st.sampled_from(channel),
        },
        optional={
            "delay": spans(),
            "dynamic": flags,
            "delay_rules": delay_rules,
            "priority": st.sampled_from(["high", "normal", "low"]),
            "enabled": flags,
            "rollout": st.fixed_dictionaries({}, optional={"percent": percents, "communities": chats}),
            "over_cap": st.sampled_from(["suppress", "defer"]),
            "expires_after": some_time,
            "canary": st.fixed_dictionaries(
                {"template": st.sampled_from(template)},
                optional={"percent": percents, "communities": chats, "guard": canary_guards},
            ),
            "cancel_on": chats,
            "on_repeat": st.sampled_from(["each", "keep", "restart"]),
            "goal": st.fixed_dictionaries({"event": words, "within": some_time}),
            "holdout": percents,
            "tags": chats,
            "when": conditions,
            "variants": st.lists(
                st.fixed_dictionaries({"key": keys, "template": st.sampled_from(template), "when": conditions}),
                max_size=2,
                unique_by=lambda variant: variant["key"],
            ),
            "guards": st.fixed_dictionaries(
                {},
                optional={
                    "cap": st.sampled_from(["apply", "count_only", "ignore"]),
                    "dedupe": switches,
                    "conversation": switches,
                    "quiet_hours": switches,
                    "holdout": switches,
                },
            ),
        },
    )


quiet_hours = st.fixed_dictionaries(
    {"kind": st.just("quiet_hours"), "from": clocks, "to": clocks},
    optional={"timezone": st.sampled_from(["Asia/Shanghai", "Europe/Berlin"]), "enabled": flags},
).filter(lambda rule: rule["from"] != rule["to"])
parts = {"channel": st.just("log"), "category": st.sampled_from(["marketing", "service"]), "tag": words}
harassment_rules = st.lists(
    st.fixed_dictionaries(
        {"kind": st.just("cap"), "limit": st.integers(1, 9), "window": some_time},
        optional={"scope": st.sampled_from(["user", "community"]), "enabled": flags, **parts},
    )
    | st.fixed_dictionaries(
        {"kind": st.just("cap"), "limit": st.integers(1, 9), "window": some_time},
        optional={"limits": st.dictionaries(words, st.integers(1, 9), max_size=3), **parts},
    )
    | st.fixed_dictionaries(
        {"kind": st.just("dedupe"), "window": some_time},
        optional={"by": st.just("content_type"), "scope": st.sampled_from(["user", "community"]), **parts},
    )
    | st.fixed_dictionaries({"kind": st.just("conversation")}, optional={"enabled": flags})
    | quiet_hours,
    max_size=5,
)


@st.composite
def draw_configs(draw: st.DrawFn) -> dict[str, Any]:
    base_config: dict[str, Any] = {
        "version": 1,
        "channels": draw(channels),
        "templates": draw(templates()),
        "communities": draw(communities),
        "stages": draw(stages),
        "delay_rules": draw(delay_rules),
        "calendars": draw(listed(calendars)),
        "harassment_rules": draw(harassment_rules),
        "holdout": draw(st.fixed_dictionaries({}, optional={"percent": percents, "key": words})),
    }
    named = [sorted({entry["key"] for entry in base_config[name]}) for name in ("stages", "templates", "channels")]
    base_config["nodes"] = draw(listed(node(*named))) if all(named) else []
    return base_config


def read_document(base_config: dict[str, Any]) -> dict[str, Any]:
    """Through the text, as a file goes."""
    return plan.parse_document(write_yaml(base_config).encode())


def plan_document(base_config: dict[str, Any]) -> plan.ChangePlan:
    return plan.plan_changes(read_document(base_config))


def apply_document(base_config: dict[str, Any]) -> None:
    given = read_document(base_config)
    plan.store_plan(given, plan.plan_changes(given), Stamp("test"))


@pytest.mark.django_db
@settings(max_examples=6, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])
@given(first=draw_configs(), second=draw_configs(), with_secrets=flags)
def test_exported_config_applies_without_change(
    first: dict[str, Any], second: dict[str, Any], with_secrets: bool
) -> None:
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


def test_shipped_matrix_round_trips(apply: Apply, export: Apply) -> None:
    apply(SHIPPED.read_text(encoding="utf-8"))
    before = export()
    assert "{{ user.name }}，您好！" in before
    assert apply(before).startswith("no changes\n")
    assert export() == before


def test_admin_only_values_round_trip(apply: Apply, export: Apply, base_config: str) -> None:
    apply(base_config)
    row = Node.objects.get()
    row.delay_rules = {"default": 60}
    row.save()
    Community.objects.create(chat_id="c1", targets={"log": {}})
    row.template.texts.all().delete()
    shown = export()
    assert "body: null\n" in shown
    assert apply(shown).startswith("no changes\n")
