"""The errors of the first wrong entry are reported by their path, and nothing is stored."""

import pytest
from django.core.management import call_command
from django.core.management.base import CommandError

from scheduling.models import ChannelConfig, Configuration, EventType, Node, Stage, Template
from tests.scheduling.config_file.conftest import BASE_CONFIG
from tests.support.tables import each_row

NODE = "{key: n, stage: presale, trigger: order.paid, template: guide, channel: log"


def with_node(base_config, rest):
    """The base configuration with another node whose remaining keys are `rest`."""
    return base_config.replace("nodes:\n", f"nodes:\n  - {NODE}, {rest}}}\n")


BAD_SECTIONS = [
    ("version: 2", "version: must be 1"),
    ("node: []", "node: is not known here"),
    ("nodes: {}", "nodes: must be a list"),
    ("stages: [x]", "stages[0]: must be a mapping"),
    ("stages: [{name: 售前}]", "stages[0].key: is missing"),
    ("stages: [{key: Pre Sale}]", "stages[0].key: must be lower-case letters, digits, “-”, “_” and “.”, at most 64"),
    ("stages: [{key: 7}]", "stages[0].key: must be text; put it in quotes"),
    ("stages: [{key: a}, {key: a}]", "stages[1]: “a” is listed already, at stages[0]"),
    ("stages: [{key: a, position: -1}]", "stages[0].position: must be between 0 and 32767"),
    ("stages: [{key: a, colour: red}]", "stages[0].colour: is not known here; known are key, name, position"),
    ("channels: [{key: a, kind: fax}]", "channels[0].kind: there is no channel kind “fax”"),
    ("channels: [{key: a, kind: http, url: 'https://a.example.com/', code_field: c, errors: [{code: 1, then: x}]}]",
     "channels[0].errors.0.then: must be one of permanent"),
    ("channels: [{key: a, kind: webhook}]", "channels[0].url: is missing"),
    ("channels: [{key: a, kind: log, timeout: 21s}]", "channels[0].timeout: must not be longer than 20s"),
    ("channels: [{key: a, kind: log, idempotent: 'yes'}]", "channels[0].idempotent: must be true or false"),
    ("channels: [{key: a, kind: log, retry: [0]}]", "channels[0].retry: each must be above zero and at most 7d"),
    ("channels: [{key: a, kind: wecom, daily_limit: 0}]", "channels[0].daily_limit: must be between 1 and 1000000"),
    ("channels: [{key: a, kind: wecom, daily_limit: 9, monthly_limit: 8}]", "channels[0].monthly_limit: must be at"),
    ("channels: [{key: a, kind: webhook, url: (kept)}]", "channels[0].url: there is nothing stored to keep"),
    ("templates: [{key: a, content_type: t}]", "templates[0].body: is missing"),
    ("templates: [{key: a, content_type: t, body: ''}]", "templates[0].body: must not be empty"),
    ("templates: [{key: a, content_type: t, category: spam, body: x}]", "templates[0].category: must be one of"),
    ("templates: [{key: a, content_type: t, body: 'hi {{ user.nmae }}'}]", "templates[0].body: line 1"),
    ("templates: [{key: a, content_type: t, body: x}, {key: a, content_type: t, body: y}]",
     "templates[1].locale: “zh-hans” is listed already for “a”"),
    ("templates: [{key: a, content_type: t, body: x}, {key: a, content_type: u, body: y, locale: en}]",
     "templates[1].content_type: must be the same as at templates[0]"),
    ("communities: [{chat_id: c, targets: {fax: {}}}]", "communities[0].targets.fax: there is no channel or channel"),
    ("communities: [{chat_id: c, targets: {wecom: {url: 'https://example.com/x'}}}]",
     "communities[0].targets.wecom.url: the host must be qyapi.weixin.qq.com"),
    ("communities: [{chat_id: c, targets: {wecom: {url: (kept)}}}]",
     "communities[0].targets.wecom.url: there is nothing stored to keep"),
    ("delay_rules: {by_level: {vip: -1h}}", "delay_rules.by_level.vip: must not be negative"),
    ("delay_rules: {active_factor: 0}", "delay_rules.active_factor: must be between 0.01 and 10"),
    ("delay_rules: {level: {}}", "delay_rules.level: is not known here"),
    ("calendars: [{key: a, country: XX}]", "calendars[0].country: the holidays of “XX” are not known"),
    ("calendars: [{key: a, timezone: Peking}]", "calendars[0].timezone: “Peking” is not an IANA time zone"),
    ("calendars: [{key: a, closed: ['2026-02-30']}]", "calendars[0].closed[0]: “2026-02-30” is not a day like"),
    ("calendars: [{key: a, closed: ['2026-02-01', '2026-02-01']}]", "calendars[0].closed: names something twice"),
    ("calendars: [{key: a, open: ['2026-02-28'], closed: ['2026-02-28']}]", "calendars[0].open: 2026-02-28 is also"),
    ("calendars: [{key: a, send_window: {from: '9:00', to: '18:00', calendar: b}}]",
     "calendars[0].send_window.calendar: there is no calendar “b”"),
    ("harassment_rules: [{}]", "harassment_rules[0].kind: is missing"),
    ("harassment_rules: [{kind: mute}]", "harassment_rules[0].kind: must be one of cap"),
    ("harassment_rules: [{kind: cap, window: 24h, limit: 0}]", "harassment_rules[0].limit: must be between 1 and"),
    ("harassment_rules: [{kind: cap, window: 0, limit: 3}]", "harassment_rules[0].window: must be above zero"),
    ("harassment_rules: [{kind: conversation, scope: community}]", "harassment_rules[0].scope: only a cap or a dedupe"),
    ("harassment_rules: [{kind: cap, window: 1h, limit: 3, channel: fax}]", "harassment_rules[0].channel: there is no"),
    ("harassment_rules: [{kind: cap, window: 1h, limit: 3, tag: 5}]", "harassment_rules[0].tag: must be text"),
    ("harassment_rules: [{kind: cap, window: 1h, limit: 3, limits: {vip: 0}}]",
     "harassment_rules[0].limits.vip: must be a whole number from 1 to 1000000"),
    ("harassment_rules: [{kind: cap, window: 1h, limit: 3, limits: {vip: 5}, scope: community}]",
     "harassment_rules[0].limits: a level belongs to a customer"),
    ("harassment_rules: [{kind: dedupe, window: 1h, by: body}]", "harassment_rules[0].by: must be one of content_type"),
    ("harassment_rules: [{kind: quiet_hours, from: 22:00, to: 08:00, timezone: Asia/Peking}]",
     "harassment_rules[0].timezone: “Asia/Peking” is not an IANA time zone"),
    ("harassment_rules: [{kind: quiet_hours, from: '22:00', to: '08:00', tag: sale}]",
     "harassment_rules[0].tag: is not known here"),
    (
        "templates: [{key: a, content_type: t, category: spam, body: x}, {key: a, content_type: t, category: service,"
        " body: y, locale: en}]",
        "templates[0].category: must be one of marketing, service",
    ),
    ("campaigns: [{key: a, threshold: 1m, starts_at: '0001-01-01T00:00:00+08:00', ends_at: '2026-01-01T00:00Z'}]",
     'campaigns[0].starts_at: must be an instant like "2026-11-11T00:00:00+08:00"'),
    ("holdout: {percent: 101}", "holdout.percent: must be between 0 and 100"),
    ("holdout: {share: 5}", "holdout.share: is not known here; known are key, percent"),
    ("harassment_rules: [{kind: quiet_hours, from: 22:00, to: '8'}]", "harassment_rules[0].to: must be a time like"),
    ("harassment_rules: [{kind: quiet_hours, from: 22:00, to: 22:00}]", "harassment_rules[0].to: must differ from the"),
]  # fmt: skip
BAD_NODES = [
    ("stage: x", "line 7: “stage” is given twice"),
    ("delay: 15", "nodes[0].delay: “15” is not a duration; write it like 15m, 2h, 7d or 1h30m"),
    ("priority: urgent", "nodes[0].priority: must be one of high, normal, low"),
    ("enabled: 1", "nodes[0].enabled: must be true or false"),
    ("rollout: {percent: 101}", "nodes[0].rollout.percent: must be between 0 and 100"),
    ("rollout.percent: 5", "nodes[0].rollout.percent: is not known here"),
    ("rollout: {communities: [c1, c1]}", "nodes[0].rollout.communities: names something twice"),
    ("expires_after: 0", "nodes[0].expires_after: must be above zero"),
    ("canary: {template: guide-v2}", "nodes[0].canary.template: there is no template “guide-v2”"),
    ("canary: {percent: 10}", "nodes[0].canary.template: is missing: a canary needs the template it tries"),
    ("canary: {guard: {steps: [50, 5]}}", "nodes[0].canary.guard.steps: must grow from above 0 to at most 100"),
    ("cancel_on: order.paid", "nodes[0].cancel_on: must be a list"),
    ("goal: {event: order.paid}", "nodes[0].goal.within: is missing"),
    ("goal: {event: ' ', within: 7d}", "nodes[0].goal.event: is missing"),
    ("on_repeat: never", "nodes[0].on_repeat: must be one of each, keep, restart"),
    ("guards: {cap: off}", "nodes[0].guards.cap: must be one of apply, count_only, ignore"),
    ("guards: {dedupe: count_only}", "nodes[0].guards.dedupe: must be one of apply, ignore"),
    ("when: {all: []}", "nodes[0].when: must be “all” or “any” with a list of rows"),
    ("when: {all: [{field: total, op: eq, value: 1}]}", "nodes[0].when.all[0].field: “total” is not known"),
    ("when: {all: [{field: event.data.total, operator: is, value: 1}]}", "nodes[0].when.all[0]: must have field"),
    ("when: {all: [{any: [{field: event.data.total, op: gte, value: much}]}]}",
     "nodes[0].when.all[0].any[0].value: must be a number"),
    ("variants: [{key: a, template: guide}]", "nodes[0].variants[0].when: must be “all” or “any” with a list of rows"),
    ("variants: [{key: a, template: guide, when: {all: [{field: chat_id, op: exists}]}}, "
     "{key: a, template: guide, when: {all: [{field: chat_id, op: exists}]}}]",
     "nodes[0].variants[1].key: “a” is the key of another variant"),
    ("variants: [{key: a, template: gone, when: {all: [{field: chat_id, op: exists}]}}]",
     "nodes[0].variants[0].template: there is no template “gone”"),
    ("variants: {}", "nodes[0].variants: must be a list of at most 10 variants"),
    ("at: 10", 'nodes[0].at: must be a time like "22:00"'),
    ("at_day: working", "nodes[0].at: is missing: the day is chosen for a time"),
    ("at: '10:00', not_before: '09:00'", "nodes[0].not_before: cannot apply together with a fixed time of day"),
    ("send_window: {days: [monday], from: '9:00', to: '18:00'}", "nodes[0].send_window.days: must be a list of some"),
    ("send_window: [{from: '9:00', to: '24:00'}, {from: '9:00', to: '24:01'}]",
     'nodes[0].send_window[1].to: must be a time like "09:00"'),
    ("send_window: {from: '9:00', to: '18:00', timezone: Peking}",
     "nodes[0].send_window.timezone: “Peking” is not customer or an IANA time zone"),
    ("send_window: {from: '20:00', to: '8:00'}", "nodes[0].send_window.to: must end later than it starts"),
    ("send_window: {from: '9:00', to: '18:00', calendar: moon}", "nodes[0].send_window.calendar: there is no calendar"),
    ("delay_rules: {by_level: {vip: 1h}}", "nodes[0].delay_rules.default: is missing"),
]  # fmt: skip


def test_bad_sections_are_refused(refusal_of, base_config):
    """The start of each problem is here: its path, and what is wrong with it."""
    wrong = {}
    for text, problem in [*BAD_SECTIONS, *((with_node(base_config, rest), problem) for rest, problem in BAD_NODES)]:
        found, *after = (line.rpartition("configuration.yaml: ")[2] for line in refusal_of(text))
        if not found.startswith(problem) or after != ["nothing was stored"]:
            wrong[problem] = [found, *after]
    assert wrong == {}


FOLLOWING = "stage: presale, trigger: touch.delivered, template: guide, channel: log"


@each_row(
    "nodes, messages",
    [
        (["key: a, from_nodes: [presale-download], {f}"], []),
        (["key: a, {f}"], ["nodes[0].from_nodes: is missing: “touch.delivered” is about touches of other nodes"]),
        (["key: a, from_nodes: [gone], {f}"], ["nodes[0].from_nodes: there is no node “gone”"]),
        (["key: a, from_nodes: [7], {f}"], ["nodes[0].from_nodes: must be text; put it in quotes"]),
        (["key: a, from_nodes: [a], {f}"], ["nodes[0].from_nodes: a node cannot follow itself: a ← a"]),
        (["key: a, from_nodes: [b], {f}", "key: b, from_nodes: [presale-download, c], {f}",
          "key: c, from_nodes: [a], {f}"],
         ["nodes[0].from_nodes: a node cannot follow itself: a ← b ← c ← a"]),
        (["key: a, from_nodes: [presale-download], stage: presale, trigger: order.paid, template: guide, channel: log"],
         ["nodes[0].from_nodes: needs one of these triggers: touch.bounced, touch.cancelled, touch.clicked, "
          "touch.delivered, touch.failed, touch.read, touch.replied, touch.suppressed, touch.unknown"]),
    ],
)  # fmt: skip
def test_followed_nodes_are_checked(refusal_of, apply, base_config, nodes, messages):
    rows = "".join(f"  - {{{each.replace('{f}', FOLLOWING)}}}\n" for each in nodes)
    text = base_config.replace("nodes:\n", f"nodes:\n{rows}")
    if messages:
        assert [line.strip() for line in refusal_of(text) if "from_nodes" in line] == messages
    else:
        apply(text)
        assert Node.objects.get(key="a").from_nodes == ["presale-download"]
        lines = refusal_of(text.replace("presale-download, stage", "other, stage"))
        assert "nodes[0].from_nodes: there is no node “presale-download”" in lines


def test_journey_longer_than_its_limit_is_refused(refusal_of, apply, base_config, settings):
    """Also where the edited node is in the middle of the chain."""
    settings.AFTERTOUCH_JOURNEY_DEPTH = 2
    rows = [f"  - {{key: {key}, from_nodes: [{before}], {FOLLOWING}}}\n" for key, before in
            [("a", "presale-download"), ("b", "a"), ("c", "b")]]  # fmt: skip
    apply(base_config.replace("nodes:\n", f"nodes:\n{''.join(rows[:2])}"))
    lines = [line.strip() for line in refusal_of(base_config.replace("nodes:\n", f"nodes:\n{''.join(rows)}"))]
    chain = "from_nodes: at most 2 touches may come before another one: c ← b ← a ← presale-download"
    assert lines == [f"nodes[0].{chain}", "nothing was stored"]


VARIANT = "variants: [{key: v, when: {all: [{field: chat_id, op: exists}]}, template: other}]"
HOURS = "{from: '9:00', to: '18:00', calendar: china}"
STILL_USED = [
    (with_node(BASE_CONFIG, f"send_window: {HOURS}") + "\ncalendars: [{key: china}]\n", "calendars: [{key: sun}]",
     "calendars: calendar “china” is not listed, but node “n” still uses it"),
    (f"calendars: [{{key: china}}]\nsilence_policies: [{{key: default, threshold: 1m, hours: {HOURS}}}]",
     "calendars: []\nsilence_policies: []",
     "calendars: calendar “china” is not listed, but silence policy “default” still uses it"),
    # The node continued with the retired template, and the exported document was refused.
    (with_node(BASE_CONFIG, VARIANT).replace(
        "templates: [", "templates: [{key: other, content_type: guide, body: x}, "
     ),
     "templates: [{key: guide, content_type: guide, body: x}]",
     "templates: template “other” is not listed, but node “n” still uses it"),
    ("channels: [{key: log, kind: log}, {key: other, kind: log}]\n"
     "harassment_rules: [{kind: cap, limit: 3, window: 24h, channel: other}]",
     "channels: [{key: log, kind: log}]",
     "channels: channel “other” is not listed, but anti-harassment rule “cap (user)” still uses it"),
    (BASE_CONFIG, "templates: []\nchannels: []",
     "templates: template “guide” is not listed, but node “presale-download” still uses it"),
    ("channels: [{key: hook, kind: webhook, url: 'https://example.com/'}]",
     "channels: [{key: hook, kind: email, url: (kept)}]", "channels[0].url: there is nothing stored to keep"),
]  # fmt: skip


@each_row("stored, text, problem", STILL_USED)
def test_row_that_is_still_used_cannot_be_left_out(refusal_of, apply, stored, text, problem):
    apply(stored)
    assert refusal_of(text)[0] == problem


def test_apply_references_must_be_in_the_file(refusal_of, apply, base_config):
    apply(base_config)
    assert (
        refusal_of(
            """
        templates: [{key: other, content_type: guide, body: x}]
        nodes: [{key: n, stage: presale, trigger: order.paid, template: guide, channel: log}]
        """
        )[0]
        == "nodes[0].template: there is no template “guide”"
    )


FINE = "{key: fine, stage: presale, trigger: order.paid, template: guide, channel: log}"
BAD = "{key: bad, stage: nowhere, trigger: order.paid, template: guide, channel: hook, delay: 1}"
WRONG_NODES = [
    ([FINE, BAD, FINE], [
        "nodes[1].delay: “1” is not a duration; write it like 15m, 2h, 7d or 1h30m",
        "nodes[1].stage: there is no stage “nowhere”",
        "nodes[1].channel: there is no channel “hook”",
    ]),
    ([FINE, FINE, BAD], ["nodes[1]: “fine” is listed already, at nodes[0]"]),
    ([FINE, "{stage: presale}"], [
        "nodes[1].key: is missing", "nodes[1].trigger: is missing", "nodes[1].template: is missing",
        "nodes[1].channel: is missing",
    ]),
    ([FINE], ["harassment_rules[1].limit: is missing", "harassment_rules[1].window: is missing"]),
]  # fmt: skip


def test_apply_reports_all_errors_of_the_first_wrong_entry(refusal_of):
    before = Configuration.objects.get().version
    for nodes, problems in WRONG_NODES:
        document = f"""
        version: 1
        channels: [{{key: log, kind: log}}]
        templates: [{{key: guide, content_type: guide, body: x}}]
        stages: [{{key: presale}}]
        nodes: [{", ".join(nodes)}]
        harassment_rules: [{{kind: cap, limit: 3, window: 24h}}, {{kind: cap}}]
        """
        assert refusal_of(document) == [*problems, "nothing was stored"]
    assert not any(model.objects.exists() for model in (ChannelConfig, Template, Stage, Node, EventType))
    assert Configuration.objects.get().version == before


def test_apply_missing_file_is_reported(db):
    with pytest.raises(CommandError, match=r"nowhere\.yaml: No such file or directory"):
        call_command("apply_config", "nowhere.yaml")
