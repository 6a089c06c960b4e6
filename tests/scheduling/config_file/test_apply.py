"""What a file makes of what is stored: the difference that is printed is the difference that is made."""

from __future__ import annotations

import threading
from collections.abc import Callable
from datetime import time, timedelta
from typing import Any

import pytest
from django.core.management import call_command
from django.core.management.base import CommandError
from django.db import connection, transaction

from scheduling.channels.kinds import channel_kinds
from scheduling.configuration.file import apply as plan
from scheduling.configuration.file import document
from scheduling.configuration.file.base import Stamp
from scheduling.errors import Conflict
from scheduling.models import (
    ChannelConfig,
    Community,
    Configuration,
    DelayRule,
    EventType,
    HarassmentRule,
    Node,
    Stage,
    Template,
    TemplateText,
)

Apply = Callable[..., str]
HOOK = "https://192.0.2.7.example.org/hook"
SECRET = "whsec_" + "A" * 32


def out(*lines: str) -> str:
    return "".join(f"{line}\n" for line in lines)


def test_apply_stores_every_key_of_the_format(apply: Apply) -> None:
    EventType.objects.bulk_create(EventType(key=key) for key in ("material.downloaded", "order.paid"))
    said = apply(
        f"""
        version: 1
        channels: [{{key: hook, kind: webhook, url: "{HOOK}", secret: {SECRET}, idempotent: false, timeout: 5s,
                    retry: [10s, 1m]}}]
        templates:
          - {{key: guide, content_type: guide, category: service, body: "您好 {{{{ user.name }}}}", locale: zh-hans}}
          - {{key: guide, content_type: guide, category: service, body: Hello, subject: Hi, locale: en}}
          - {{key: guide-v2, content_type: guide, body: 新版}}
        communities: [{{chat_id: c1, name: 一群, targets: {{hook: {{url: "{HOOK}"}}}}}}]
        stages: [{{key: presale, name: 售前}}, {{key: insale}}]
        nodes: [{{key: presale-download, stage: presale, trigger: material.downloaded, delay: 15m, dynamic: true,
              template: guide, channel: hook, priority: high, enabled: false,
              rollout: {{percent: 12.5, communities: [c1]}}, over_cap: defer, expires_after: 1d,
              canary: {{template: guide-v2, percent: 10, communities: [c2],
                       guard: {{steps: [10, 100], time: 2h, complaints: 0.5, opt_outs: ""}}}},
              cancel_on: [order.paid], on_repeat: keep,
              goal: {{event: order.paid, within: 7d}}, holdout: 5,
              delay_rules: {{by_level: {{vip: 1h30m}}, default: 2h}},
              guards: {{cap: count_only, dedupe: ignore, conversation: ignore, quiet_hours: ignore}}}}]
        delay_rules: {{by_level: {{vip: 1h, normal: 2h}}, default: 24h, active_within: 24h, active_factor: 0.6}}
        harassment_rules:
          - {{kind: cap, scope: community, limit: 3, window: 24h}}
          - {{kind: dedupe, by: content_type, window: 72h}}
          - {{kind: conversation}}
          - {{kind: quiet_hours, from: "22:00", to: "08:30", timezone: Europe/Berlin, enabled: false}}
        """
    )
    assert said == out(
        "channels", "  + hook", "templates", "  + guide", "  + guide-v2", "communities", "  + c1",
        "stages", "  + presale", "  + insale", "nodes", "  + presale-download", "delay_rules", "  + dynamic delay",
        "harassment_rules", "  + cap (community)", "  + dedupe (user)", "  + conversation (user)",
        "  + quiet_hours (user)", "applied",
    )  # fmt: skip
    hook = ChannelConfig.objects.get(key="hook")
    assert (hook.config, hook.idempotent) == ({"url": HOOK, "secret": SECRET}, False)
    assert (hook.timeout, hook.retry_delays) == (timedelta(seconds=5), [10, 60])
    assert list(TemplateText.objects.values_list("template__key", "locale", "subject", "body").order_by("id")) == [
        ("guide", "zh-hans", "", "您好 {{ user.name }}"),
        ("guide", "en", "Hi", "Hello"),
        ("guide-v2", "zh-hans", "", "新版"),
    ]
    assert Template.objects.get(key="guide-v2").category == "marketing"
    assert Community.objects.get().targets == {"hook": {"url": HOOK}}
    assert list(Stage.objects.values_list("key", "name", "position")) == [("presale", "售前", 0), ("insale", "", 1)]
    node = Node.objects.get()
    assert (node.stage.key, node.template.key, node.canary_template.key) == ("presale", "guide", "guide-v2")  # type: ignore[union-attr]
    assert (node.delay, node.dynamic, node.priority, node.enabled) == (timedelta(minutes=15), True, 0, False)
    assert node.delay_rules == {
        "by_level": {"vip": 5400}, "default": 7200, "active_within": 86400, "active_factor": 1.0,
    }  # fmt: skip
    assert (node.rollout_percent, node.rollout_communities) == (12.5, ["c1"])
    assert (node.canary_percent, node.canary_communities, node.holdout_percent) == (10, ["c2"], 5)
    assert node.canary_guard == {
        "steps": [10, 100], "time": 7200, "touches": 200, "judged_from": 50,
        "complaints": "+0.5", "failures": "+2", "opt_outs": "",
    }  # fmt: skip
    assert (node.over_cap, node.expires_after, node.cancel_on) == ("defer", timedelta(days=1), ["order.paid"])
    assert (node.on_repeat, node.goal_event, node.goal_within) == ("keep", "order.paid", timedelta(days=7))
    assert (node.guard_cap, node.guard_dedupe) == ("count_only", "ignore")
    assert (node.guard_conversation, node.guard_quiet_hours) == ("ignore", "ignore")
    rule = DelayRule.objects.get()
    assert (rule.by_level, rule.active_factor) == ({"vip": 3600, "normal": 7200}, 0.6)
    cap, dedupe, conversation, quiet = HarassmentRule.objects.all()
    assert (cap.scope, cap.limit, cap.window) == ("community", 3, timedelta(hours=24))
    assert (dedupe.window, conversation.enabled) == (timedelta(hours=72), True)
    assert (quiet.quiet_from, quiet.quiet_to, quiet.timezone) == (time(22), time(8, 30), "Europe/Berlin")
    assert quiet.enabled is False


def test_apply_uses_defaults_of_kind_and_model(apply: Apply, base_config: str) -> None:
    apply(base_config + "communities: [{chat_id: c1}]\n")
    assert ChannelConfig.objects.get().idempotent is channel_kinds()["log"].default_idempotent
    node = Node.objects.get()
    assert (node.enabled, node.expires_after, node.rollout_percent) == (True, timedelta(days=3), 100)
    assert (node.goal_within, node.canary_template, node.delay_rules) == (None, None, None)


def test_apply_prints_changed_fields(apply: Apply, base_config: str) -> None:
    apply(base_config)
    changed = base_config.replace("delay: 15m", "delay: 20m, guards: {cap: ignore}").replace("您好", "早上好")
    said = apply(changed.replace("name: 售前", "name: 客户旅程"))
    assert said == out(
        "templates",
        "  ~ guide",
        "      body[zh-hans]: 您好 {{ user.name }} → 早上好 {{ user.name }}",
        "stages",
        "  ~ presale",
        "      name: 售前 → 客户旅程",
        "nodes",
        "  ~ presale-download",
        "      delay: 15m → 20m",
        "      guards.cap: apply → ignore",
        "node presale-download (changed): 0 waiting touches; with --move-waiting 0 would move, 0 of them overdue then",
        "note: nodes[0].trigger: no event of type “material.downloaded” is known yet",
        "applied",
    )
    assert Node.objects.get().delay == timedelta(minutes=20)
    assert Template.objects.get().version == 2


def test_apply_again_changes_nothing(apply: Apply, base_config: str) -> None:
    EventType.objects.create(key="material.downloaded")
    apply(base_config)
    before = Configuration.objects.get().version
    assert apply(base_config) == "no changes\n"
    assert Configuration.objects.get().version == before
    assert Node.objects.get().version == 1
    assert Node.history.count() == 1


def test_apply_versions_changed_rows_only(apply: Apply, base_config: str) -> None:
    apply(base_config)
    apply(base_config.replace("delay: 15m", "delay: 20m"))
    assert (Node.objects.get().version, Template.objects.get().version, ChannelConfig.objects.get().version) == (
        2,
        1,
        1,
    )
    assert list(Node.history.values_list("history_change_reason", flat=True)) == ["apply_config configuration.yaml"] * 2


def test_apply_text_change_is_a_template_version(apply: Apply, base_config: str) -> None:
    apply(base_config)
    text = "{key: guide, content_type: guide, category: service, body: Hi, locale: en}"
    english = base_config.replace("templates: [", f"templates: [{text}, ")
    said = apply(english)
    assert "      body[en]: (none) → Hi\n" in said
    assert Template.objects.get().version == 2
    apply(base_config)
    assert Template.objects.get().version == 3
    assert TemplateText.objects.get().locale == "zh-hans"


def test_apply_dry_run_prints_same_and_writes_nothing(apply: Apply, base_config: str) -> None:
    dry = apply(base_config, "--dry-run")
    assert not Node.objects.exists()
    wet = apply(base_config)
    assert dry.removesuffix("dry run: nothing was stored\n") == wet.removesuffix("applied\n")
    assert Node.objects.exists()


def test_apply_retires_unlisted_and_restores_listed(apply: Apply, base_config: str) -> None:
    apply(base_config)
    first = Node.objects.get()
    said = apply("nodes: []")
    assert said == out(
        "nodes",
        "  - presale-download (retired)",
        "node presale-download (retired): 0 waiting touches",
        "applied",
    )
    assert Node.objects.get().retired_at is not None
    assert apply("nodes: []") == "no changes\n"
    assert apply("stages: []\ntemplates: []\nchannels: []").count("(retired)") == 3
    said = apply(base_config)
    assert said.count("(was retired)") == 4
    node = Node.objects.get()
    assert (node.pk, node.retired_at, node.version) == (first.pk, None, 3)
    assert not Stage.objects.exclude(retired_at=None).exists()


def test_apply_absent_section_is_unchanged(apply: Apply, base_config: str) -> None:
    apply(base_config)
    assert apply("version: 1") == "no changes\n"
    apply("templates: [{key: guide, content_type: guide, category: service, body: 您好}]")
    assert Node.objects.get().retired_at is None
    assert Stage.objects.get().retired_at is None


def test_apply_ignores_recorded_communities(apply: Apply, export: Apply) -> None:
    with connection.cursor() as cursor:
        cursor.execute("INSERT INTO scheduling_community (chat_id, name, targets) VALUES ('c9', '', '')")
    assert apply("communities: [{chat_id: c1, name: 一群}]") == out("communities", "  + c1", "applied")
    assert Community.objects.get(chat_id="c9").retired_at is None
    assert "c9" not in export()


def test_apply_matches_rules_by_kind_and_scope(apply: Apply) -> None:
    apply(
        """
        harassment_rules: [{kind: cap, limit: 3, window: 24h}, {kind: cap, limit: 9, window: 7d}, {kind: conversation}]
        """
    )
    three, _, conversation = HarassmentRule.objects.all()
    said = apply("harassment_rules: [{kind: cap, limit: 4, window: 24h}, {kind: cap, limit: 9, window: 7d}]")
    assert said == out(
        "harassment_rules", "  ~ cap (user)", "      limit: 3 → 4", "  - conversation (user) (retired)", "applied"
    )
    three.refresh_from_db()
    conversation.refresh_from_db()
    assert (three.limit, three.version, conversation.retired_at is None) == (4, 2, False)
    assert (
        apply("harassment_rules: [{kind: cap, limit: 9, window: 7d}, {kind: cap, limit: 4, window: 24h}]")
        == "no changes\n"
    )
    apply("harassment_rules: [{kind: conversation}]")
    assert list(HarassmentRule.objects.filter(retired_at=None)) == [conversation]
    assert HarassmentRule.objects.count() == 3


def test_apply_keeps_marked_secrets_and_prints_none(apply: Apply, export: Apply) -> None:
    base_config = f"""
    channels: [{{key: hook, kind: webhook, url: "{HOOK}", secret: {SECRET}}}]
    communities: [{{chat_id: c1, targets: {{wecom: {{url: "https://qyapi.weixin.qq.com/cgi-bin/webhook/send?key=s3"}}}}}}]
    """
    assert SECRET not in apply(base_config)
    shown = export()
    assert (SECRET in shown, HOOK in shown, "s3" in shown) == (False, False, False)
    assert "secret: (kept)" in shown
    assert apply(shown) == "no changes\n"
    assert ChannelConfig.objects.get().config == {"url": HOOK, "secret": SECRET}
    said = apply(base_config.replace(SECRET, "whsec_" + "B" * 32).replace("key=s3", "key=s4"))
    assert said == out(
        "channels", "  ~ hook", "      secret: (secret) → (secret)",
        "communities", "  ~ c1", "      targets.wecom.url: (secret) → (secret)", "applied",
    )  # fmt: skip
    whole = export("--with-secrets")
    assert "whsec_" + "B" * 32 in whole
    assert apply(whole) == "no changes\n"


def test_apply_kept_secret_of_other_kind_is_refused(apply: Apply, refusal_of: Callable[..., list[str]]) -> None:
    apply(f"channels: [{{key: hook, kind: webhook, url: '{HOOK}'}}]")
    assert refusal_of("channels: [{key: hook, kind: email, url: (kept)}]")[0] == (
        "channels[0].url: there is nothing stored to keep"
    )


def test_store_plan_refuses_concurrent_edit(apply: Apply, base_config: str) -> None:
    apply(base_config)
    given = document.parse_document(base_config.replace("delay: 15m", "delay: 20m").encode())
    planned = plan.plan_changes(given)
    Node.objects.update(delay=timedelta(minutes=5))
    with pytest.raises(Conflict, match="another user changed the configuration at the same time"):
        plan.store_plan(given, planned, Stamp("late"))
    assert Node.objects.get().delay == timedelta(minutes=5)


@pytest.mark.django_db(transaction=True)
def test_store_plan_waits_for_open_edit_and_refuses(base_config: str) -> None:
    given = document.parse_document(base_config.encode())
    plan.store_plan(given, plan.plan_changes(given), Stamp("first"))
    later = document.parse_document(base_config.replace("delay: 15m", "delay: 20m").encode())
    outcome: list[Any] = []

    def apply_later() -> None:
        try:
            planned = plan.plan_changes(later)
            planned_already.set()
            plan.store_plan(later, planned, Stamp("second"))
        except Conflict as error:
            outcome.append(error)
        finally:
            connection.close()

    planned_already = threading.Event()
    with transaction.atomic():
        Node.objects.update(delay=timedelta(minutes=1))
        thread = threading.Thread(target=apply_later)
        thread.start()
        planned_already.wait(10)
    thread.join(20)
    assert [type(each) for each in outcome] == [Conflict]
    assert Node.objects.get().delay == timedelta(minutes=1)


def test_export_with_secrets_is_private_file(apply: Apply, base_config: str, tmp_path: Any) -> None:
    apply(base_config)
    call_command("export_config", str(tmp_path / "open.yaml"))
    call_command("export_config", str(tmp_path / "closed.yaml"), "--with-secrets")
    assert (tmp_path / "open.yaml").stat().st_mode & 0o777 == 0o644
    assert (tmp_path / "closed.yaml").stat().st_mode & 0o777 == 0o600
    with pytest.raises(CommandError, match="No such file or directory"):
        call_command("export_config", str(tmp_path / "nowhere" / "x.yaml"))
