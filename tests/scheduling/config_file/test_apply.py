"""What a file makes of what is stored: the difference that is printed is the difference that is made."""

import io
import json
from datetime import time, timedelta

import pytest
from django.core.management import call_command
from django.core.management.base import CommandError
from django.db import IntegrityError, connection
from django.test.utils import CaptureQueriesContext

import manage
from rpa_tasks.models import Platform
from scheduling.channels.base import channel_kinds
from scheduling.configuration.file import apply as plan
from scheduling.configuration.file.section import Stamp
from scheduling.configuration.file.sections import Communities
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
from tests.support.second_connection import act_behind_locks
from tests.support.tables import each_row

HOOK = "https://192.0.2.7.example.org/hook"
SECRET = "whsec_" + "A" * 32
PROXY = "http://buyer:word@proxy.example.com:3128"


def out(*lines):
    return "".join(f"{line}\n" for line in lines)


def test_apply_stores_every_key_of_the_format(apply):
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
                       guard: {{steps: [10, 100], time: 2h, complaints: 0.25}}}},
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
    assert (node.stage.key, node.template.key, node.canary_template.key) == ("presale", "guide", "guide-v2")
    assert (node.delay, node.dynamic, node.priority, node.enabled) == (timedelta(minutes=15), True, 0, False)
    assert node.delay_rules == {
        "by_level": {"vip": 5400}, "default": 7200, "active_within": 86400, "active_factor": 1.0,
    }  # fmt: skip
    assert (node.rollout_percent, node.rollout_communities) == (12.5, ["c1"])
    assert (node.canary_percent, node.canary_communities, node.holdout_percent) == (10, ["c2"], 5)
    assert node.canary_guard == {
        "steps": [10, 100], "time": 7200, "touches": 200, "complaints": 0.25, "failures": 5
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


def test_apply_uses_defaults_of_kind_and_model(apply, base_config):
    apply(base_config)
    assert ChannelConfig.objects.get().idempotent is channel_kinds()["log"].default_idempotent
    node = Node.objects.get()
    assert (node.enabled, node.expires_after, node.rollout_percent) == (True, timedelta(days=3), 100)


def test_apply_prints_changed_fields(apply, base_config):
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


def test_apply_again_changes_nothing_and_an_edit_versions_its_row_only(apply, base_config):
    EventType.objects.create(key="material.downloaded")
    apply(base_config)
    before = Configuration.objects.get().version
    assert apply(base_config) == "no changes\n"
    assert Configuration.objects.get().version == before
    assert list(Node.history.values_list("history_change_reason", flat=True)) == ["apply_config configuration.yaml"]
    apply(base_config.replace("delay: 15m", "delay: 20m"))
    assert [model.objects.get().version for model in (Node, Template, ChannelConfig)] == [2, 1, 1]


def test_apply_is_one_version_of_a_template(apply):
    def store(content_type, *texts):
        own = f"key: guide, content_type: {content_type}, category: service"
        apply(f"version: 1\ntemplates: [{', '.join(f'{{{own}, {each}}}' for each in texts)}]\n")
        return Template.objects.get().version

    english, french, none = "locale: en, body: hi", "locale: fr, body: salut", "body: null"
    assert store("guide", english, french) == 1
    assert store("guide", none) == 2
    assert store("guide", english) == 3, "the first text"
    assert store("other", "locale: en, body: hello", french) == 4


def test_apply_dry_run_prints_same_and_writes_nothing(apply, base_config):
    dry = apply(base_config, "--dry-run")
    assert not Node.objects.exists()
    wet = apply(base_config)
    assert dry.removesuffix("dry run: nothing was stored\n") == wet.removesuffix("applied\n")
    assert Node.objects.exists()


def test_apply_retires_unlisted_and_restores_listed(apply, base_config):
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


def test_apply_absent_section_is_unchanged(apply, base_config):
    apply(base_config)
    assert apply("version: 1") == "no changes\n"
    apply("templates: [{key: guide, content_type: guide, category: service, body: 您好}]")
    assert Node.objects.get().retired_at is None
    assert Stage.objects.get().retired_at is None


def test_apply_distinguishes_true_from_one_in_a_condition(apply, base_config):
    """For Python `True == 1`, but a condition compares with types."""
    node = base_config.rstrip().removesuffix("}")
    versions = []
    for value in ("1", "true", "1"):
        assert "no changes" not in apply(
            f"{node}, when: {{all: [{{field: event.data.n, op: eq, value: {value}}}]}}}}\n"
        )
        versions.append(Node.objects.get().version)
        assert f'"value": {value}' in json.dumps(Node.objects.get().when)
    assert versions == [1, 2, 3]


def list_plan(count):
    """A file with `count` rows in each section that has rows."""
    numbers = range(count)
    window = {"from": "09:00", "to": "18:00", "calendar": "c0"}
    condition = {"all": [{"field": "event.data.n", "op": "eq", "value": 1}]}
    return {
        "channels": [
            {"key": f"h{n}", "kind": "webhook", "url": f"{HOOK}{n}", "secret": SECRET, "timeout": "5s"} for n in numbers
        ],
        "templates": [
            {"key": f"t{n}", "content_type": "guide", "body": "hello", "locale": locale}
            for n in numbers for locale in ("en", "de")
        ],
        "communities": [{"chat_id": f"c{n}", "targets": {"h0": {"url": f"{HOOK}{n}"}}} for n in numbers],
        "calendars": [{"key": f"c{n}", "send_window": window} for n in numbers],
        "stages": [{"key": f"s{n}"} for n in numbers],
        "nodes": [
            {
                "key": f"n{n}", "stage": f"s{n}", "trigger": "order.paid", "template": f"t{n}", "channel": f"h{n}",
                "canary": {"template": "t0", "percent": 5}, "when": condition, "send_window": window,
                "variants": [{"key": "v", "when": condition, "template": f"t{n}"}],
            }
            for n in numbers
        ],
        "harassment_rules": [{"kind": "cap", "limit": n + 1, "window": "1d", "channel": f"h{n}"} for n in numbers],
        "webhooks": [{"key": f"w{n}", "url": HOOK, "secret": SECRET, "events": ["job.ended"]} for n in numbers],
        "platforms": [{"key": f"p{n}", "check": "sync", "browser": {"proxy": {"url": "http://p:1"}}} for n in numbers],
        "flows": [
            {"platform": f"p{n}", "task_type": "sync", "idempotent": True, "command": ["true", "{param}"]}
            for n in numbers
        ],
        "shops": [{"platform": f"p{n}", "shop_id": "s1"} for n in numbers],
        "silence_policies": [{"key": f"p{n}", "threshold": "1m", "hours": window} for n in numbers],
        "campaigns": [
            {"key": f"k{n}", "threshold": "1m", "starts_at": "2026-01-01T00:00Z", "ends_at": "2026-01-02T00:00Z"}
            for n in numbers
        ],
    }  # fmt: skip


def test_queries_of_a_plan_and_of_unchanged_rows_do_not_grow_with_rows(db):
    EventType.objects.create(key="order.paid")

    def count(action):
        with CaptureQueriesContext(connection) as queries:
            action()
        return len(queries)

    counts = []
    for size in (1, 2, 4):  # with the first one, no template is stored yet whose texts could be read
        file = list_plan(size)
        new = count(lambda file=file: plan.plan_changes(file))
        planned = plan.plan_changes(file)
        plan.store_document(file, Stamp("first"), planned.confirm)
        exported = plan.export_document()
        counts.append(
            {
                "new": new,
                "unchanged": count(lambda file=file: plan.plan_changes(file)),
                "kept secrets": count(lambda file=exported: plan.plan_changes(file)),
                "stored without a change": count(
                    lambda file=file: plan.store_document(file, Stamp("again"), plan.plan_changes(file).confirm)
                ),
                "retired": count(lambda file=file: plan.plan_changes({name: [] for name in file})),
                "export": count(plan.export_document),
            }
        )
        assert plan.plan_changes(file).changes == plan.plan_changes(exported).changes == []
    assert counts[1] == counts[2]
    assert counts[1]["unchanged"] < 40


def test_null_group_or_optional_value_is_the_default(apply, base_config):
    apply(base_config)
    nulls = "rollout: , canary: {template: , guard: }, goal: , guards: , when: , send_window: , at: , delay_rules: "
    assert apply(base_config.replace("delay: 15m", f"delay: 15m, {nulls}")).startswith("no changes\n")
    shop = "platforms: [{key: pdd, browser: }]\nshops: [{platform: pdd, shop_id: s1, browser: {proxy: , provider: }}]"
    assert apply(shop).endswith("applied\n")
    assert apply(shop) == "no changes\n"


def test_apply_matches_rules_by_kind_and_scope(apply):
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


def test_rule_that_is_left_out_changes_no_other_rule(apply, export):
    first, second = "{kind: cap, limit: 1, window: 1d}", "{kind: cap, limit: 2, window: 2d}"
    apply(f"harassment_rules: [{first}, {second}]")
    assert apply(f"harassment_rules: [{second}]") == out("harassment_rules", "  - cap (user) (retired)", "applied")
    other = f"harassment_rules: [{second}, {{kind: cap, limit: 9, window: 9d}}]"
    assert apply(other) == out("harassment_rules", "  + cap (user)", "applied")
    assert apply(other) == "no changes\n"
    assert apply(export()) == "no changes\n"
    apply(f"harassment_rules: [{second}]")
    given = plan.parse_document(f"harassment_rules: [{second}]".encode())
    assert plan.store_document(given, Stamp("again"), plan.ChangePlan.without_existing).changes == []


def test_edited_rule_keeps_its_place(apply, refusal_of):
    """It has no key. Its row was found by kind and scope, and then counted as the last one of the file."""
    apply("harassment_rules: [{kind: cap, limit: 1, window: 1d}, {kind: dedupe, window: 1d}]")
    edited = "harassment_rules: [{kind: cap, limit: 1, window: 2d}, {kind: dedupe, window: 1d, enabled: false}]"
    assert apply(edited, "--dry-run").splitlines()[1:5] == [
        "  ~ cap (user)", "      window: 1d → 2d", "  ~ dedupe (user)", "      enabled: true → false",
    ]  # fmt: skip
    wrong = edited.replace("2d}", "2d, channel: fax}").replace("window: 1d,", "window: 1d, channel: fax,")
    assert refusal_of(wrong)[0].startswith("harassment_rules[0].channel: there is no channel")


def test_delay_rules_without_their_defaults_are_no_edit(apply, base_config):
    text = base_config.replace("delay: 15m", "dynamic: true, delay_rules: {default: 1h}")
    apply(text)
    Node.objects.update(delay_rules={"default": 3600, "by_level": {}})
    said = apply(text.replace("key: presale-download", "key: presale-download, name: 下载"))
    assert "node presale-download (changed): 0 waiting touches\n" in said


def test_apply_keeps_marked_secrets_and_prints_none(apply, export):
    base_config = f"""
    channels: [{{key: hook, kind: webhook, url: "{HOOK}", secret: {SECRET}, proxy: "{PROXY}"}}]
    communities: [{{chat_id: c1, targets: {{wecom: {{url: "https://qyapi.weixin.qq.com/cgi-bin/webhook/send?key=s3"}}}}}}]
    """
    assert SECRET not in apply(base_config)
    shown = export()
    assert (SECRET in shown, HOOK in shown, "s3" in shown, "proxy.example" in shown) == (False,) * 4
    assert "secret: (kept)" in shown
    assert apply(shown) == "no changes\n"
    assert ChannelConfig.objects.get().config == {"url": HOOK, "secret": SECRET, "proxy": PROXY}
    said = apply(base_config.replace(SECRET, "whsec_" + "B" * 32).replace("key=s3", "key=s4"))
    assert said == out(
        "channels", "  ~ hook", "      secret: (secret) → (secret)",
        "communities", "  ~ c1", "      targets.wecom.url: (secret) → (secret)", "applied",
    )  # fmt: skip
    assert "proxy: (secret) → (secret)" in apply(base_config.replace(":3128", ":3129"), "--dry-run")
    whole = export("--with-secrets")
    assert "whsec_" + "B" * 32 in whole
    assert apply(whole) == "no changes\n"


def test_counted_conversations_are_read_only_if_listed(apply, export):
    apply("communities: [{chat_id: named, name: Regulars}]")
    with connection.cursor() as cursor:  # as delivery does
        cursor.execute(
            "INSERT INTO scheduling_community (chat_id, name, targets) VALUES ('c1', '', ''), ('c2', '', '')"
        )
    assert [row.chat_id for row in Communities().list_rows()] == ["named"]
    exported = export()
    assert "c1" not in exported
    assert apply(exported) == "no changes\n"
    assert "  ~ c1\n" in apply("communities: [{chat_id: named, name: Regulars}, {chat_id: c1, name: New}]")
    assert dict(Community.objects.values_list("chat_id", "name")) == {"named": "Regulars", "c1": "New", "c2": ""}
    assert Community.objects.get(chat_id="c2").retired_at is None


def test_kept_secret_that_does_not_fit_is_refused(apply, refusal_of):
    """The mark itself was stored in its place."""
    apply("platforms: [{key: pdd}]")
    secret = {"username": "buyer", "password": "x" * 256}  # of an earlier version
    Platform.objects.update(browser={"proxy_url": "http://p:1"}, proxy_secret=secret)
    kept = "platforms: [{key: pdd, browser: {proxy: {url: 'http://p:1', username: (kept), password: (kept)}}}]"
    problem = "platforms[0].browser.proxy.password: must not be longer than 255 characters"
    assert refusal_of(kept) == [problem, "nothing was stored"]
    assert Platform.objects.get().proxy_secret == secret


@each_row("kind", ["log", "rpa"])
def test_channel_named_as_target_does_not_reveal_it(apply, export, kind):
    target = "{wecom: {url: 'https://qyapi.weixin.qq.com/cgi-bin/webhook/send?key=s3'}}"
    apply(f"communities: [{{chat_id: c1, targets: {target}}}]")
    ChannelConfig.objects.create(key="wecom", kind=kind)
    shown = export()
    assert ("s3" in shown, "url: (kept)" in shown) == (False, True)
    assert "s3" not in apply("communities: [{chat_id: c1, targets: {}}]", "--dry-run")


@each_row("place", ["/send", "/token"])
def test_apply_kept_secret_of_other_host_is_refused(apply, refusal_of, place):
    channel = """
    channels:
      - {key: sms, kind: http, url: "https://api.example.com/send", secret: long-secret,
         token: {url: "https://api.example.com/token", body: {secret: "{{ channel.secret }}"}}}
    """
    apply(channel)
    kept = channel.replace("long-secret", "(kept)")
    problem = "channels[0].secret: must be entered again for another host"
    for other in (f"evil.example.com{place}", f"api.example.com:8443{place}"):
        assert refusal_of(kept.replace(f"api.example.com{place}", other))[0] == problem
    apply(kept.replace(place, f"/v2{place}"))
    assert ChannelConfig.objects.get().config["secret"] == "long-secret"
    apply(channel.replace(f"api.example.com{place}", f"other.example.com{place}"))


def test_apply_that_fails_late_stores_nothing(apply, base_config):
    with connection.cursor() as cursor:
        cursor.execute("ALTER TABLE scheduling_historicalnode ADD CONSTRAINT refused CHECK (key <> 'presale-download')")
    with pytest.raises(IntegrityError, match="refused"):
        apply(base_config)
    assert not any(model.objects.exists() for model in (ChannelConfig, Template, Stage, Node))


@pytest.mark.django_db(transaction=True)
def test_document_waits_for_open_edit_and_is_refused(base_config):
    given = plan.parse_document(base_config.encode())
    plan.store_document(given, Stamp("first"), plan.plan_changes(given).confirm)
    later = plan.parse_document(base_config.replace("delay: 15m", "delay: 20m").encode())

    def apply_later():
        with pytest.raises(Conflict):
            plan.store_document(later, Stamp("second"), plan.plan_changes(later).confirm)

    act_behind_locks(lambda: Node.objects.update(delay=timedelta(minutes=1)), apply_later)
    assert Node.objects.get().delay == timedelta(minutes=1)


def test_export_with_secrets_is_private_file(apply, base_config, tmp_path):
    apply(base_config)
    call_command("export_config", str(tmp_path / "open.yaml"))
    call_command("export_config", str(tmp_path / "closed.yaml"), "--with-secrets")
    assert (tmp_path / "open.yaml").stat().st_mode & 0o777 == 0o644
    assert (tmp_path / "closed.yaml").stat().st_mode & 0o777 == 0o600
    with pytest.raises(CommandError, match="No such file or directory"):
        call_command("export_config", str(tmp_path / "nowhere" / "x.yaml"))


PERSONS = """
version: 1
channels:
  - {key: members, kind: wecom_app, corp_id: ww1, agent_id: 7, secret: a-long-secret, format: card, quotas: [30/1m]}
  - {key: notices, kind: wechat_official, app_id: wx1, secret: a-long-secret, type: subscription}
  - {key: sms, kind: sms_tencent, secret_id: a, secret: a-long-secret, sdk_app_id: 14, sign_name: 示例}
  - key: texts
    kind: http
    url: "https://api.vendor.example.com/send?key=a-long-secret"
    secret: a-long-secret
    headers: {X-Id: "{{ message.id }}"}
    body: {to: ["{{ message.address }}"], flash: false, at: null, rate: 1.5}
    token: {url: "https://api.vendor.example.com/token", body: {a: "{{ channel.secret }}"}, lifetime: 1h}
    success: {field: code, op: in, value: [0, ok]}
    code_field: code
    errors: [{code: [1, x], then: retry, after: 1m}]
"""


def test_apply_exported_person_channels_changes_nothing(apply, export):
    apply(PERSONS)
    before = {row.key: (row.config, row.version) for row in ChannelConfig.objects.all()}

    text = export()
    said = apply(text)

    assert "a-long-secret" not in text + said
    assert {row.key: (row.config, row.version) for row in ChannelConfig.objects.all()} == before
    assert before["texts"][0]["body"] == {"to": ["{{ message.address }}"], "flash": False, "at": None, "rate": 1.5}


def test_export_is_utf_8_on_any_terminal(apply, monkeypatch):
    """GBK has no letter for the emoji."""
    apply("stages: [{key: presale, name: 售前 🎁}]")
    written = io.BytesIO()
    monkeypatch.setattr("sys.stdout", terminal := io.TextIOWrapper(written, encoding="gbk"))
    call_command("export_config")
    terminal.flush()
    assert "售前 🎁" in written.getvalue().decode("utf-8")


def test_no_command_ends_at_a_character_that_the_terminal_lacks(monkeypatch):
    written = io.BytesIO()
    monkeypatch.setattr("sys.stdout", terminal := io.TextIOWrapper(written, encoding="gbk"))
    monkeypatch.setattr("sys.stderr", io.StringIO())
    monkeypatch.setattr(manage, "adopt_stack_settings", lambda *_: None)
    monkeypatch.setattr("django.core.management.execute_from_command_line", lambda words: print("售前 🎁"))
    manage.main()
    terminal.flush()
    assert written.getvalue().decode("gbk") == "售前 \\U0001f381\n"
