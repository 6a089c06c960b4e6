from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta

import pytest
from django.test import Client
from django.utils.timezone import now

from scheduling.models import ChannelConfig, Community, DisabledTarget, Pause
from tests.scheduling.admin.conftest import FillForm, FormErrors, SaveForm, Url
from tests.support.matrix import MatrixBuilder
from tests.support.tables import each_row
from tests.support.undrawn import read_context

pytestmark = pytest.mark.django_db

SECRET = "whsec_" + "Y" * 32
PROXY = "http://buyer:hush@proxy.example.com:3128"
ROBOT = "https://qyapi.weixin.qq.com/cgi-bin/webhook/send?key=hush"


@pytest.fixture
def hook() -> ChannelConfig:
    config = {"url": "https://example.com/in?token=hush", "secret": SECRET, "proxy": PROXY}
    return ChannelConfig.objects.create(key="hook", kind="webhook", config=config)


@each_row("group", ["viewer", "editor"])
def test_channel_secret_is_never_shown(
    hook: ChannelConfig, as_member: Callable[[str], Client], admin_url: Url, group: str
) -> None:
    client = as_member(group)
    change, history = (admin_url(f"channelconfig_{page}", hook.pk) for page in ("change", "history"))
    version = admin_url("channelconfig_simple_history", hook.pk, hook.history.latest().pk)
    answers = [client.get(url) for url in (change, history, version)]
    for text in (answer.content.decode() for answer in answers):
        assert "hush" not in text
        assert SECRET not in text
    assert "••••" in answers[0].content.decode()
    assert all(field.field.disabled for field in answers[2].context["adminform"].form), "an old state is not edited"


def test_channel_secret_empty_stays_and_dash_removes(hook: ChannelConfig, admin_url: Url, save_form: SaveForm) -> None:
    url = admin_url("channelconfig_change", hook.pk)
    save_form(url, timeout="5s", retry_delays="10s, 1m")
    hook.refresh_from_db()
    assert hook.config == {"url": "https://example.com/in?token=hush", "secret": SECRET, "proxy": PROXY}
    assert (hook.timeout, hook.retry_delays, hook.version) == (timedelta(seconds=5), [10, 60], 2)
    save_form(url, secret_secret="-", secret_url="https://example.org/new", secret_proxy="direct")
    hook.refresh_from_db()
    assert hook.config == {"url": "https://example.org/new", "proxy": "direct"}
    save_form(url, secret_proxy="-")
    hook.refresh_from_db()
    assert hook.config == {"url": "https://example.org/new"}
    save_form(url, kind="wecom", settings="format: markdown")
    hook.refresh_from_db()
    assert hook.config == {"format": "markdown"}, "a channel of another kind keeps none of them"


def test_channel_form_errors_name_the_field(hook: ChannelConfig, list_form_errors: FormErrors, admin_url: Url) -> None:
    wrong = [
        ({"secret_url": "http://169.254.169.254/"}, "secret_url"),
        ({"secret_secret": "short"}, "secret_secret"),
        ({"secret_url": "-"}, "secret_url"),
        ({"secret_proxy": "http://10.0.0.1:6379"}, "secret_proxy"),
        ({"secret_proxy": "http://buyer:hush@proxy"}, "secret_proxy"),
        ({"secret_proxy": "socks5://buyer:hush@proxy:1080"}, "secret_proxy"),
        ({"settings": "colour: red"}, "settings"),
        ({"settings": "no mapping"}, "settings"),
        ({"timeout": "1h"}, "timeout"),
        ({"retry_delays": "soon"}, "retry_delays"),
        ({"daily_limit": "0"}, "daily_limit"),
        ({"daily_limit": "10", "monthly_limit": "9"}, "monthly_limit"),
    ]
    errors = list_form_errors(admin_url("channelconfig_change", hook.pk), *(changes for changes, _ in wrong))
    assert [each for each, (_, field) in zip(errors, wrong, strict=True) if field not in each] == []
    assert "hush" not in str(errors)
    hook.refresh_from_db()
    assert hook.version == 1


def test_channel_shows_pause_and_disabled_targets_until_they_are_enabled(
    hook: ChannelConfig, editor: Client, admin_url: Url, fill_form: FillForm
) -> None:
    DisabledTarget.objects.create(channel=hook, target_digest="0" * 64, chat_id="c1", reason="gone")
    Pause.objects.create(scope="channel:hook")
    listed = editor.get(admin_url("channelconfig_changelist")).content.decode()
    assert "Paused" in listed
    assert '<span class="at-bad">1</span>' in listed
    url = admin_url("channelconfig_change", hook.pk)
    assert "gone" in editor.get(url).content.decode()
    data = fill_form(url)
    removal = {key.replace("-id", "-DELETE"): "on" for key in data if key.endswith("0-id")}
    assert removal
    assert editor.post(url, {**data, **removal}).status_code == 302
    assert not DisabledTarget.objects.exists()


def test_list_counts_the_nodes_in_use_of_a_channel(matrix: MatrixBuilder, viewer: Client, admin_url: Url) -> None:
    matrix.node("guide")
    matrix.node("former", retired_at=now())
    (row,) = read_context(viewer, admin_url("channelconfig_changelist"))["cl"].result_list
    assert row.used == 1


def test_community_keeps_targets_left_empty_and_refuses_a_foreign_host(
    editor: Client, admin_url: Url, save_form: SaveForm, list_form_errors: FormErrors
) -> None:
    community = Community.objects.create(chat_id="c1", targets={"wecom": {"url": ROBOT}})
    url = admin_url("community_change", community.pk)
    page = editor.get(url).content.decode()
    assert ("hush" in page, "_proxy" in page) == (False, False)
    new = {"name": "One", "target_dingtalk_url": "https://oapi.dingtalk.com/robot/send?access_token=1"}
    save_form(url, **new, target_dingtalk_secret="SEC1")
    community.refresh_from_db()
    assert community.targets["wecom"] == {"url": ROBOT}
    assert community.targets["dingtalk"]["secret"] == "SEC1"
    save_form(url, target_wecom_url="-")
    community.refresh_from_db()
    assert list(community.targets) == ["dingtalk"]
    (errors,) = list_form_errors(url, {"target_wecom_url": "https://example.com/robot"})
    assert list(errors) == ["target_wecom_url"]
    assert "the host must be qyapi.weixin.qq.com" in errors["target_wecom_url"]
