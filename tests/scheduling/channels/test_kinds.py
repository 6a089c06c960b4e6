"""The contract of every channel kind."""

import io
import json
from contextlib import suppress
from datetime import timedelta

import pytest
import structlog

from scheduling.channels.base import Delivered, InvalidSetting, Unknown, channel_kinds
from scheduling.channels.email import Email
from scheduling.channels.log import Log
from scheduling.channels.robots import DingTalk, Feishu, WeCom
from scheduling.channels.vendors.declared import DeclaredHttp
from scheduling.channels.vendors.sms import AliyunSms, TencentSms
from scheduling.channels.vendors.wechat import MiniProgram, OfficialAccount, WeChatService, WeComApp
from scheduling.channels.webhook import Webhook
from tests.scheduling.channels.http_receivers import build_message, time_out
from tests.support.tables import each_row

MINIMAL = {
    Webhook: {"url": "https://example.com/"}, WeCom: {}, DingTalk: {}, Feishu: {}, Email: {}, Log: {},
    WeComApp: {"corp_id": "ww1", "agent_id": 7, "secret": "s"},
    WeChatService: {"corp_id": "ww1", "open_kfid": "wk1", "secret": "s"}, DeclaredHttp: {"url": "https://example.com/"},
    OfficialAccount: {"app_id": "wx1", "secret": "s"}, MiniProgram: {"app_id": "wx1", "secret": "s"},
    AliyunSms: {"access_key_id": "a", "sign_name": "n", "secret": "s"},
    TencentSms: {"secret_id": "a", "sdk_app_id": 1, "sign_name": "n", "secret": "s"},
}  # fmt: skip
every = each_row("kind", list(MINIMAL))


@every
def test_kind_is_registered_and_names_its_receiver(kind):
    assert channel_kinds()[kind.kind] is kind
    assert kind(MINIMAL[kind], timedelta(seconds=5)).target_key(build_message())


@every
def test_kind_refuses_unknown_settings(kind):
    with pytest.raises(ValueError, match=r"^colour: is not known here"):
        kind(MINIMAL[kind] | {"colour": "red"}, timedelta(seconds=5))
    with pytest.raises(ValueError, match=r"^colour: is not known here"):
        kind.validate_target({"colour": "red"})


@every
def test_kind_takes_or_refuses_any_value(kind):
    odd = (
        None, "", [], {}, 0, -1, True, False, 1.5, 10**20, float("nan"), "\0", "\ud800", "9" * 5_000, [[]], [{}],
        {"a": []}, {1: 2}, {"field": "a", "op": []}, {"field": [], "op": "in"}, [{"code": [[]]}], [{"then": []}],
    )  # fmt: skip
    with pytest.raises(InvalidSetting) as unknown:
        kind(MINIMAL[kind] | {"?": 1}, timedelta(seconds=5))
    for name in str(unknown.value).rpartition("known are ")[2].split(", "):
        for value in odd:
            with suppress(InvalidSetting):
                kind(MINIMAL[kind] | {name: value}, timedelta(seconds=5))
            with suppress(InvalidSetting):
                kind.validate_target({name: value})


@each_row(
    "kind, name, values",
    [(Webhook, "secret", [0, False, {}]), (DeclaredHttp, "errors", [0, False, "", {}])],
)
def test_empty_value_of_another_type_is_refused(kind, name, values):
    for value in values:
        with pytest.raises(InvalidSetting, match=f"^{name}: must be"):
            kind(MINIMAL[kind] | {name: value}, timedelta(seconds=5))


async def test_log_channel_shows_body_at_debug_only(monkeypatch):
    everything = structlog.wrap_logger(None, wrapper_class=structlog.make_filtering_bound_logger("debug"))
    monkeypatch.setattr("scheduling.channels.log.logger", everything)
    with structlog.testing.capture_logs() as lines:
        outcome = await Log({}, timedelta(seconds=1)).send(build_message())

    assert isinstance(outcome, Delivered)
    info, debug = lines
    assert (info["action"], info["log_level"], info["user_id"]) == ("touch_logged", "info", "alice")
    assert "body" not in info
    assert (debug["log_level"], debug["body"]) == ("debug", build_message().body)


async def test_log_channel_writes_standard_log_line(capsys):
    """It goes past `logging`, which the others go through."""
    message = build_message(user_id="客户", target={"url": "of the channel's former kind"})
    assert isinstance(await Log({}, timedelta(seconds=1)).send(message), Delivered)

    line = json.loads(capsys.readouterr().err)
    assert (line["event"], line["task_id"], line["user_id"]) == ("Touch logged", str(message.task_id), "客户")
    assert (line["level"], line["logger"]) == ("info", "scheduling.channels.log")
    assert line["timestamp"].endswith("Z")


async def test_log_channel_delivers_with_closed_stderr(monkeypatch):
    closed = io.StringIO()
    closed.close()
    monkeypatch.setattr("sys.stderr", closed)
    assert await Log({}, timedelta(seconds=1)).send(build_message()) == Delivered("logged")


async def test_channel_that_never_ends_is_unknown():
    class Endless(Log):
        async def attempt(self, message):
            await time_out()
            raise AssertionError

    outcome = await Endless({}, timedelta(seconds=5)).send(build_message())
    assert outcome == Unknown("timeout", "no end after 5 s")
