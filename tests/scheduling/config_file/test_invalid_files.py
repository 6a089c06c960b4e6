"""Everything that is wrong is said at once, by its path, and nothing is stored."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from scheduling.models import ChannelConfig, Configuration, EventType, Node, Stage, Template

Refused = Callable[..., list[str]]

NODE = "{key: n, stage: presale, trigger: order.paid, template: guide, channel: log"


def with_node(base_config: str, rest: str) -> str:
    """The base configuration with another node whose remaining keys are `rest`."""
    return base_config.replace("nodes:\n", f"nodes:\n  - {NODE}, {rest}}}\n")


@pytest.mark.parametrize(
    ("section", "message"),
    [
        ("version: 2", "version: must be 1"),
        ("node: []", "node: is not known here; known are version, channels, templates, communities, stages, nodes, "
         "delay_rules, harassment_rules, platforms, flows, shops, silence_policies, campaigns"),
        ("nodes: {}", "nodes: must be a list"),
        ("nodes:", "nodes: must be a list"),
        ("stages: [x]", "stages[0]: must be a mapping"),
        ("stages: [{name: 售前}]", "stages[0].key: is missing"),
        ("stages: [{key: Pre Sale}]",
         "stages[0].key: must be lower-case letters, digits, “-”, “_” and “.”, at most 64"),
        ("stages: [{key: 7}]", "stages[0].key: must be text; put it in quotes"),
        ("stages: [{key: a}, {key: a}]", "stages[1]: “a” is listed already, at stages[0]"),
        ("stages: [{key: a, position: -1}]", "stages[0].position: must be between 0 and 32767"),
        ("stages: [{key: a, position: first}]", "stages[0].position: must be a whole number"),
        ("stages: [{key: a, colour: red}]", "stages[0].colour: is not known here; known are key, name, position"),
        ("channels: [{key: a, kind: fax}]",
         "channels[0].kind: there is no channel kind “fax”; available: dingtalk, email, feishu, inapp, log, rpa, "
         "webhook, wecom"),
        ("channels: [{key: a, kind: webhook}]", "channels[0].url: is missing"),
        ("channels: [{key: a, kind: log, url: x}]", "channels[0].url: is not known here; known are none"),
        ("channels: [{key: a, kind: log, timeout: 21s}]", "channels[0].timeout: must not be longer than 20s"),
        ("channels: [{key: a, kind: log, timeout: 0}]", "channels[0].timeout: must be above zero"),
        ("channels: [{key: a, kind: log, idempotent: 'yes'}]", "channels[0].idempotent: must be true or false"),
        ("channels: [{key: a, kind: log, retry: [10]}]",
         "channels[0].retry: “10” is not a duration; write it like 15m, 2h, 7d or 1h30m"),
        ("channels: [{key: a, kind: log, retry: [0]}]", "channels[0].retry: each must be above zero and at most 7d"),
        ("channels: [{key: a, kind: wecom, secret: x}]", "channels[0].secret: is not known here; known are format"),
        ("channels: [{key: a, kind: webhook, url: (kept)}]", "channels[0].url: there is nothing stored to keep"),
        ("templates: [{key: a, content_type: t}]", "templates[0].body: is missing"),
        ("templates: [{key: a, body: x}]", "templates[0].content_type: is missing"),
        ("templates: [{key: a, content_type: t, body: ''}]", "templates[0].body: must not be empty"),
        ("templates: [{key: a, content_type: t, category: spam, body: x}]",
         "templates[0].category: must be one of marketing, service"),
        ("templates: [{key: a, content_type: t, body: 'hi {{ user.nmae }}'}]",
         "templates[0].body: line 1: unknown variable “user.nmae”; user has id, level, locale, name, timezone"),
        ("templates: [{key: a, content_type: t, body: 'hi {{ user.name'}]",
         "templates[0].body: line 1: unexpected end of template, expected 'end of print statement'."),
        ("templates: [{key: a, content_type: t, body: x, subject: '{{ me }}'}]",
         "templates[0].subject: line 1: unknown variable “me”; available: chat, event, user"),
        ("templates: [{key: a, content_type: t, body: x}, {key: a, content_type: t, body: y}]",
         "templates[1].locale: “zh-hans” is listed already for “a”"),
        ("templates: [{key: a, content_type: t, body: x}, {key: a, content_type: u, body: y, locale: en}]",
         "templates[1].content_type: must be the same as at templates[0]"),
        ("communities: [{chat_id: c, targets: {fax: {}}}]",
         "communities[0].targets.fax: there is no channel or channel kind “fax”"),
        ("communities: [{chat_id: c, targets: {wecom: {}}}]", "communities[0].targets.wecom.url: is missing"),
        ("communities: [{chat_id: c, targets: {wecom: {url: 'https://example.com/x'}}}]",
         "communities[0].targets.wecom.url: the host must be qyapi.weixin.qq.com"),
        ("communities: [{chat_id: c, targets: {wecom: {url: (kept)}}}]",
         "communities[0].targets.wecom.url: there is nothing stored to keep"),
        ("communities: [{chat_id: c, targets: [x]}]", "communities[0].targets: must be a mapping"),
        ("delay_rules: []", "delay_rules: must be a mapping"),
        ("delay_rules: {by_level: {vip: -1h}}", "delay_rules.by_level.vip: must not be negative"),
        ("delay_rules: {default: 2y}",
         "delay_rules.default: “2y” is not a duration; write it like 15m, 2h, 7d or 1h30m"),
        ("delay_rules: {active_factor: 0}", "delay_rules.active_factor: must be between 0.01 and 10"),
        ("delay_rules: {level: {}}",
         "delay_rules.level: is not known here; known are active_factor, active_within, by_level, default"),
        ("harassment_rules: [{}]", "harassment_rules[0].kind: is missing"),
        ("harassment_rules: [{kind: mute}]",
         "harassment_rules[0].kind: must be one of cap, dedupe, conversation, quiet_hours"),
        ("harassment_rules: [{kind: cap, window: 24h}]", "harassment_rules[0].limit: is missing"),
        ("harassment_rules: [{kind: cap, window: 24h, limit: 0}]",
         "harassment_rules[0].limit: must be between 1 and 1000000"),
        ("harassment_rules: [{kind: cap, window: 0, limit: 3}]", "harassment_rules[0].window: must be above zero"),
        ("harassment_rules: [{kind: dedupe, window: 1h, scope: community}]",
         "harassment_rules[0].scope: only a cap can be counted for a community"),
        ("harassment_rules: [{kind: dedupe, window: 1h, by: body}]",
         "harassment_rules[0].by: must be one of content_type"),
        ("harassment_rules: [{kind: conversation, limit: 3}]",
         "harassment_rules[0].limit: is not known here; known are enabled, kind, scope"),
        ("harassment_rules: [{kind: quiet_hours, from: 22:00, to: '8'}]",
         'harassment_rules[0].to: must be a time like "22:00"'),
        ("harassment_rules: [{kind: quiet_hours, from: 22:00, to: 08:00, timezone: Asia/Peking}]",
         "harassment_rules[0].timezone: “Asia/Peking” is not an IANA time zone, like Asia/Shanghai"),
        ("harassment_rules: [{kind: quiet_hours, from: 22:00, to: 22:00}]",
         "harassment_rules[0].to: must differ from the start of quiet hours"),
        ("silence_policies: [{tag: vip, threshold: 1s}]", "silence_policies[0].threshold: must be between 2s and 12h"),
    ],
)  # fmt: skip
def test_bad_section_is_refused(refusal_of: Refused, section: str, message: str) -> None:
    assert refusal_of(section) == [message, "nothing was stored"]


@pytest.mark.parametrize(
    ("rest", "message"),
    [
        ("stage: x", "line 7: “stage” is given twice"),
        ("delay: 15", "nodes[0].delay: “15” is not a duration; write it like 15m, 2h, 7d or 1h30m"),
        ("delay: -1h", "nodes[0].delay: must not be negative"),
        ("delay: 400d", "nodes[0].delay: must not be longer than a year (365d)"),
        ("delay: [1h]", "nodes[0].delay: must be a duration like 15m, 2h, 7d or 1h30m"),
        ("priority: urgent", "nodes[0].priority: must be one of high, normal, low"),
        ("enabled: 1", "nodes[0].enabled: must be true or false"),
        ("rollout: {percent: 101}", "nodes[0].rollout.percent: must be between 0 and 100"),
        ("rollout: {percent: true}", "nodes[0].rollout.percent: must be a number"),
        ("rollout: 50", "nodes[0].rollout: must be a mapping"),
        ("rollout: {share: 5}", "nodes[0].rollout.share: is not known here; known are communities, percent"),
        ("rollout.percent: 5", "nodes[0].rollout.percent: is not known here; known are canary, cancel_on, channel, "
         "delay, delay_rules, dynamic, enabled, expires_after, goal, guards, holdout, key, on_repeat, over_cap, "
         "priority, rollout, stage, template, trigger"),
        ("rollout: {communities: [c1, c1]}", "nodes[0].rollout.communities: names something twice"),
        ("over_cap: wait", "nodes[0].over_cap: must be one of suppress, defer"),
        ("expires_after: 0", "nodes[0].expires_after: must be above zero"),
        ("canary: {template: guide-v2}", "nodes[0].canary.template: there is no template “guide-v2”"),
        ("canary: {percent: 10}", "nodes[0].canary.template: is missing: a canary needs the template it tries"),
        ("canary: {guard: slowly}", "nodes[0].canary.guard: must be a mapping"),
        ("canary: {guard: {steps: [50, 5]}}", "nodes[0].canary.guard.steps: must grow from above 0 to at most 100"),
        ("canary: {guard: {complaints: x1}}",
         "nodes[0].canary.guard.complaints: must be above x1: two equal versions differ by chance"),
        ("canary: {guard: {time: soon}}", "nodes[0].canary.guard.time: “soon” is not a duration; write it like 15m, "
         "2h, 7d or 1h30m"),
        ("cancel_on: order.paid", "nodes[0].cancel_on: must be a list"),
        ("on_repeat: never", "nodes[0].on_repeat: must be one of each, keep, restart"),
        ("goal: {event: order.paid}",
         "nodes[0].goal.within: is missing: a goal is an event and the time within which it counts"),
        ("goal: {within: 7d}",
         "nodes[0].goal.event: is missing: a goal is an event and the time within which it counts"),
        ("holdout: -1", "nodes[0].holdout: must be between 0 and 100"),
        ("guards: {cap: off}", "nodes[0].guards.cap: must be one of apply, count_only, ignore"),
        ("guards: {dedupe: count_only}", "nodes[0].guards.dedupe: must be one of apply, ignore"),
        ("delay_rules: {by_level: {vip: 1h}}", "nodes[0].delay_rules.default: is missing"),
        ("delay_rules: {default: 1h, active_factor: 99}",
         "nodes[0].delay_rules.active_factor: must be between 0.01 and 10"),
        ("delay_rules: {default: 1h, by_level: {vip: soon}}", "nodes[0].delay_rules.by_level.vip: “soon” is not a "
         "duration; write it like 15m, 2h, 7d or 1h30m"),
    ],
)  # fmt: skip
def test_bad_node_is_refused(refusal_of: Refused, base_config: str, rest: str, message: str) -> None:
    lines = refusal_of(with_node(base_config, rest))
    assert [line.rpartition("configuration.yaml: ")[2] for line in lines] == [message, "nothing was stored"]


def test_apply_references_must_be_in_the_file(refusal_of: Refused, apply: Callable[..., str], base_config: str) -> None:
    apply(base_config)
    assert refusal_of(
        """
        templates: [{key: other, content_type: guide, body: x}]
        nodes: [{key: n, stage: gone, trigger: order.paid, template: guide, channel: hook}]
        """
    ) == [
        "nodes[0].stage: there is no stage “gone”",
        "nodes[0].template: there is no template “guide”",
        "nodes[0].channel: there is no channel “hook”",
        "nothing was stored",
    ]


def test_apply_retiring_a_used_row_is_refused(refusal_of: Refused, apply: Callable[..., str], base_config: str) -> None:
    apply(base_config)
    assert refusal_of("templates: []\nchannels: []") == [
        "templates: template “guide” is not listed, but node “presale-download” still uses it",
        "channels: channel “log” is not listed, but node “presale-download” still uses it",
        "nothing was stored",
    ]


def test_apply_reports_all_errors_and_stores_nothing(refusal_of: Refused) -> None:
    before = Configuration.objects.get().version
    assert refusal_of(
        """
        version: 1
        channels: [{key: log, kind: log}, {key: hook, kind: webhook, secret: x}]
        templates: [{key: guide, content_type: guide, body: "{{ x }}", category: spam}]
        stages: [{key: presale}, {key: presale}]
        nodes:
          - {key: fine, stage: presale, trigger: order.paid, template: guide, channel: log}
          - {key: bad, stage: nowhere, trigger: order.paid, template: guide, channel: hook, delay: 1, holdout: 200}
        harassment_rules: [{kind: cap, limit: 3, window: 24h}, {kind: cap}]
        """
    ) == [
        "channels[1].url: is missing",
        "templates[0].category: must be one of marketing, service",
        "templates[0].body: line 1: unknown variable “x”; available: chat, event, user",
        "stages[1]: “presale” is listed already, at stages[0]",
        "nodes[1].delay: “1” is not a duration; write it like 15m, 2h, 7d or 1h30m",
        "nodes[1].stage: there is no stage “nowhere”",
        "nodes[1].holdout: must be between 0 and 100",
        "harassment_rules[1].limit: is missing",
        "harassment_rules[1].window: is missing",
        "nothing was stored",
    ]
    assert not any(model.objects.exists() for model in (ChannelConfig, Template, Stage, Node, EventType))
    assert Configuration.objects.get().version == before


def test_apply_missing_file_is_reported(db: None) -> None:
    from django.core.management import call_command
    from django.core.management.base import CommandError

    with pytest.raises(CommandError, match=r"nowhere\.yaml: No such file or directory"):
        call_command("apply_config", "nowhere.yaml")
