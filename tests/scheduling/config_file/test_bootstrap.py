"""`manage.py bootstrap` creates the initial rows. A second run changes nothing."""

from datetime import UTC, datetime, timedelta
from io import StringIO

import pytest
from django.contrib.auth import get_user_model
from django.contrib.auth.models import Group, Permission
from django.core.management import call_command

from rpa_tasks.configuration import check_flow
from rpa_tasks.models import Flow, Platform
from scheduling.configuration import snapshot
from scheduling.ids import new_id
from scheduling.models import ChannelConfig, Configuration, EventType, HarassmentRule, Node, Template, TemplateText
from scheduling.policy.matrix import delay_for
from scheduling.policy.specs import CustomerSpec, EventSpec, TemplateSpec, TextSpec
from scheduling.templating import render_message
from sessions.models import SilencePolicy

pytestmark = pytest.mark.django_db


@pytest.fixture(autouse=True)
def state_dir(settings, tmp_path):
    settings.AFTERTOUCH_STATE_DIR = tmp_path / "state"
    return tmp_path / "state"


def bootstrap():
    out = StringIO()
    call_command("bootstrap", stdout=out)
    return out.getvalue()


def test_bootstrap_stores_the_shipped_matrix():
    assert bootstrap().startswith("Shipped matrix: 11 nodes\n")
    assert [
        (node.stage.name, node.trigger, node.delay.total_seconds(), node.template.content_type, node.channel.kind)
        for node in Node.objects.filter(enabled=True)
    ] == [
        ("售前", "consultation.ended", 86400, "consultation-followup", "log"),
        ("售前", "material.downloaded", 900, "guide", "log"),
        ("售中", "order.paid", 7200, "order-followup", "log"),
        ("售后", "service.completed", 604800, "survey", "log"),
        ("流失预警", "customer.inactive", 86400, "winback", "log"),
        ("会话中", "session.silent", 0, "silence-guide", "inapp"),
    ]
    example = Node.objects.get(enabled=False, trigger="order.paid")
    window = {"days": ["working"], "from": "09:00", "to": "18:00", "calendar": "china"}
    assert (example.at_day, example.send_window) == ("next_working", [window])
    assert example.when == {"all": [{"field": "customer.events.order.paid.count", "op": "eq", "value": 0}]}
    silent = Node.objects.get(trigger="session.silent")
    assert (silent.guard_cap, silent.guard_dedupe, silent.guard_conversation, silent.guard_quiet_hours) == (
        "count_only", "ignore", "ignore", "ignore",
    )  # fmt: skip
    assert list(HarassmentRule.objects.values_list("kind", "limit", "enabled")) == [
        ("cap", 3, True), ("dedupe", None, True), ("conversation", None, True), ("quiet_hours", None, False),
        ("cap", 1, False), ("dedupe", None, False),
    ]  # fmt: skip

    # The delay after a consultation is dynamic.
    config = snapshot.current()
    (node,) = (node for node in config.nodes.values() if node.dynamic)
    assert node.key == "presale-consultation"
    at = datetime(2026, 3, 3, tzinfo=UTC)
    hours = {
        (level, idle): delay_for(
            node, CustomerSpec(1, "ann", level=level, last_active_at=at - timedelta(days=idle)), config.delay_rules,
            occurred_at=at,
        ) / timedelta(hours=1)
        for level in ("vip", "normal", "") for idle in (2, 1)
    }  # fmt: skip
    assert hours == {
        ("vip", 2): 1, ("vip", 1): 0.6, ("normal", 2): 2, ("normal", 1): 1.2, ("", 2): 24, ("", 1): 14.4,
    }  # fmt: skip

    # Each has a goal; one has a hold-out.
    nodes = Node.objects.filter(enabled=True).exclude(trigger="session.silent")
    assert not nodes.filter(goal_event="").exists()
    assert list(nodes.exclude(holdout_percent=0).values_list("key", "holdout_percent")) == [("churn-inactive", 5)]

    # The silence policies are those of the published case.
    rows = SilencePolicy.objects.exclude(key="default")
    assert {row.key: (row.threshold.total_seconds(), row.tags, row.after) for row in rows} == {
        "new": (30, ["new"], "any"), "returning": (180, ["returning"], "any"), "vip": (180, ["vip"], "any"),
    }  # fmt: skip


def test_bootstrap_stores_platforms_and_flows_that_are_not_in_use():
    assert "Shipped platforms, not in use: pdd, temu, tiktok\n" in bootstrap()
    flows = Flow.objects.select_related("platform").order_by("platform__key", "task_type")
    assert [flow.name for flow in flows] == [
        f"{key}_{task}" for key in ("pdd", "temu", "tiktok") for task in ("batch_reply", "refresh_goods", "sync_order")
    ]
    assert all(flow.retired_at and flow.platform.retired_at for flow in flows)
    assert flows[0].command == [
        "rpa-cli", "run", "--flow", "{flow}", "--param", "{param}", "--timeout", "{timeout}"
    ]  # fmt: skip
    for flow in flows:
        check_flow({name: getattr(flow, name) for name in ("task_type", "command", "timeout", "exit_codes")})
    Flow.objects.filter(platform__key="pdd").delete()
    Platform.objects.filter(key="pdd").delete()
    assert "platforms" not in bootstrap()
    assert Platform.objects.count() == 2, "what an operator deleted does not return"


def test_shipped_texts_render_in_both_languages():
    bootstrap()
    paid = EventSpec(new_id(), "shop", "1", "order.paid", datetime.now(UTC), "u-1", "c1")
    for template in Template.objects.all():
        texts = tuple(TextSpec(each.locale, each.subject, each.body) for each in template.texts.all())
        assert {each.locale for each in texts} == {"zh-hans", "en"}
        spec = TemplateSpec(1, template.key, 1, template.content_type, template.category, texts)
        for locale in ("zh-hans", "en"):
            subject, body, used = render_message(spec, CustomerSpec(1, "u-1", locale=locale), paid)
            assert (bool(subject), bool(body), used) == (True, True, locale)


def test_bootstrap_keeps_existing_configuration_and_names_event_types():
    EventType.objects.create(key="customer.inactive")
    EventType.objects.create(key="order.paid", name="付款", is_activity=False)
    ChannelConfig.objects.create(key="mine", kind="log")
    HarassmentRule.objects.create(kind="conversation", enabled=False)
    TemplateText.objects.create(template=Template.objects.create(key="usage-guide", content_type="own"), body="mine")
    bootstrap()
    assert set(EventType.objects.filter(is_activity=False).values_list("key", "name")) == {
        ("customer.inactive", "客户沉寂"), ("session.silent", "会话沉默"), ("order.paid", "付款"),
        ("touch.delivered", "触达已送达"), ("touch.failed", "触达失败"), ("touch.suppressed", "触达被拦截"),
        ("touch.cancelled", "触达已取消"), ("touch.unknown", "触达结果不明"),
        ("session.unanswered", "客服未回复"), ("touch.bounced", "触达被退回"),
    }  # fmt: skip
    assert EventType.objects.count() == 19
    assert ChannelConfig.objects.get(key="mine").retired_at is None
    assert HarassmentRule.objects.get(kind="conversation").enabled is False
    assert Template.objects.get(key="usage-guide").texts.get().body == "mine"
    Node.objects.filter(trigger="order.paid").delete()
    bootstrap()
    assert Node.objects.count() == 9


def test_bootstrap_groups_have_nested_permissions():
    bootstrap()
    may = {group.name: set(group.permissions.values_list("codename", flat=True)) for group in Group.objects.all()}
    assert may["viewer"] < may["operator"] < may["editor"]
    assert all(codename.startswith("view_") for codename in may["viewer"])
    assert {"view_touch", "view_node", "view_failedtask"} <= may["viewer"]
    assert may["operator"] - may["viewer"] == {
        "act_on_failedtask", "add_pause", "change_pause", "delete_pause", "change_touch", "run_job", "cancel_job",
        "take_over_shop",
    }  # fmt: skip
    assert {"add_node", "change_harassmentrule", "delete_channelconfig", "change_customer"} <= may["editor"]
    assert not {each for each in may["editor"] if each.endswith(("_apikey", "_user")) and not each.startswith("view_")}


def test_second_bootstrap_keeps_what_is_stored(state_dir):
    said = bootstrap()
    file = state_dir / "demo-password"
    password = file.read_text().strip()
    assert said.endswith(f"Demo login: demo / {password}\n")
    assert file.stat().st_mode & 0o777 == 0o600
    user = get_user_model().objects.get(username="demo")
    assert (user.is_superuser, user.check_password(password)) == (True, True)
    before = Configuration.objects.get().version
    extra = Permission.objects.get(codename="add_apikey")
    Group.objects.get(name="viewer").permissions.add(extra)

    assert bootstrap() == f"Demo login: demo / {password}\n"

    assert Configuration.objects.get().version == before
    assert extra in Group.objects.get(name="viewer").permissions.all()


def test_bootstrap_replaces_lost_password_file_and_prints_no_changed_password(state_dir):
    bootstrap()
    (state_dir / "demo-password").unlink()
    said = bootstrap()
    password = (state_dir / "demo-password").read_text().strip()
    assert password in said
    user = get_user_model().objects.get(username="demo")
    assert user.check_password(password)
    user.set_password("something else")
    user.save()
    assert bootstrap() == "Demo login: demo / (the password was changed)\n"


def test_bootstrap_in_production_makes_no_login(settings, state_dir):
    settings.AFTERTOUCH_DEMO = False
    assert bootstrap().splitlines() == [
        "Shipped matrix: 11 nodes", "Shipped platforms, not in use: pdd, temu, tiktok"
    ]  # fmt: skip
    assert bootstrap() == ""
    assert not get_user_model().objects.exists()
    assert not state_dir.exists()


@pytest.mark.django_db(transaction=True)
def test_concurrent_bootstraps_ship_once(race):
    said = race(3, lambda number: bootstrap())
    assert sorted("Shipped" in each for each in said) == [False, False, True]
    assert len({each.splitlines()[-1] for each in said}) == 1
    assert Node.objects.count() == 11
