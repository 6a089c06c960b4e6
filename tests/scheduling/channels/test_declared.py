"""A channel that operators describe, against an API of their own making."""

import asyncio
import json
import re
from datetime import timedelta
from urllib.parse import parse_qs, urlsplit

import pytest

from scheduling.channels.base import Delivered, Permanent, Quota, Transient, Unknown
from scheduling.channels.quota import receiver_key
from scheduling.channels.vendors.declared import DeclaredHttp
from tests.scheduling.channels.conftest import age_tokens
from tests.scheduling.channels.http_receivers import MessageFactory, Receiver, always, build_message, reply
from tests.support.tables import each_row

pytestmark = pytest.mark.usefixtures("token_server")
TIMEOUT = timedelta(seconds=30)
SECRET = "a-long-vendor-secret"
CONFIG = {
    "address": "phone",
    "secret": SECRET,
    "query": {"access_token": "{{ channel.token }}"},
    "headers": {"X-Request-Id": "{{ message.id }}"},
    "body": {
        "to": ["{{ message.address }}"],
        "text": "{{ message.body }}",
        "kind": "{{ event.type }}",
        "options": {"flash": False, "priority": 3, "at": "{{ message.timestamp }}"},
    },
    "token": {
        "query": {"app": "shop"}, "body": {"secret": "{{ channel.secret }}"}, "field": "data.token",
        "expires": "data.seconds",
    },
    "success": {"field": "status.code", "op": "in", "value": [0, "OK"]},
    "code_field": "status.code",
    "message_field": "status.text",
    "errors": [
        {"code": [401, "TOKEN"], "then": "refresh_token"},
        {"code": 429, "then": "quota", "after": "2m", "meaning": "太快"},
        {"code": "BUSY", "then": "retry", "after": "30s"},
        {"code": "NO_NUMBER", "then": "address_invalid"},
        {"code": "FORBIDDEN", "then": "permanent"},
        {"code": "MAYBE", "then": "unknown"},
    ],
}  # fmt: skip


class Api:
    """Gives tokens at /token. Answers everything else with `verdict`."""

    def __init__(self, verdict=None, *, accepts=""):
        self.verdict = {"status": {"code": 0, "text": "done"}} if verdict is None else verdict
        self.accepts = accepts  #: the only accepted token; empty: the last one given
        self.fetches = []
        self.calls = []

    async def __call__(self, request, writer):
        if urlsplit(request.target).path == "/token":
            self.fetches.append(request)
            document = {"data": {"token": f"token-number-{len(self.fetches)}", "seconds": "3600"}}
        else:
            self.calls.append(request)
            given = parse_qs(urlsplit(request.target).query).get("access_token", [""])[0]
            wanted = self.accepts or f"token-number-{len(self.fetches)}"
            expired = {"status": {"code": "401", "text": f"{given} is over"}}
            document = expired if self.fetches and given != wanted else self.verdict
        writer.write(reply(200, document if isinstance(document, bytes) else json.dumps(document).encode()))


async def sent(api, changes=None, count=1, **message):
    async with Receiver(api) as receiver:
        base = receiver.url.removesuffix("/hook")
        config = CONFIG | {"url": f"{base}/send"} | (changes or {})
        if config.get("token"):
            config["token"] = config["token"] | {"url": f"{base}/token"}
        channel = DeclaredHttp({name: value for name, value in config.items() if value is not None}, TIMEOUT)
        usual = {"target": {"address": "13800138000"}, "repeatable": False}
        letter = build_message(**usual | message)
        for _ in range(count):
            outcome = await channel.send(letter)
        return outcome


async def test_declared_request_is_built_from_templates():
    api = Api()

    outcome = await sent(api, body='引号 " 换行 \n 斜线 \\', count=2)

    assert isinstance(outcome, Delivered), outcome
    assert (len(api.fetches), len(api.calls)) == (1, 2)
    assert api.fetches[0].json == {"secret": SECRET}
    assert api.fetches[0].target == "/token?app=shop"
    call = api.calls[0]
    assert (call.method, call.target) == ("POST", "/send?access_token=token-number-1")
    assert call.headers["x-request-id"] == str(MessageFactory.delivery_key)
    assert call.headers["content-type"] == "application/json; charset=utf-8"
    document = call.json
    assert document.pop("options") | {"at": ""} == {"flash": False, "priority": 3, "at": ""}
    assert document == {"to": ["13800138000"], "text": '引号 " 换行 \n 斜线 \\', "kind": "material.downloaded"}


async def test_declared_form_get_and_text_requests():
    plain = {"token": None, "query": {}, "errors": None, "success": None}
    api = Api()

    await sent(api, plain | {"format": "form", "body": {"text": "{{ message.body }}", "n": 1}}, body="a&b=您")
    await sent(api, plain | {"method": "GET", "query": {"q": "{{ message.body }}"}}, body="a&b=您")
    await sent(api, plain | {"format": "text", "body": "{{ message.subject }}: {{ message.body }}"}, body="hi")

    form, get, text = api.calls
    assert parse_qs(form.body.decode()) == {"text": ["a&b=您"], "n": ["1"]}
    assert form.headers["content-type"] == "application/x-www-form-urlencoded"
    assert (get.method, get.body, parse_qs(urlsplit(get.target).query)) == ("GET", b"", {"q": ["a&b=您"]})
    assert text.body.decode() == "使用指南: hi"


async def test_declared_address_keeps_its_query_and_drops_its_fragment():
    api = Api()
    async with Receiver(api) as receiver:
        url = receiver.url + "?a=1#part"
        channel = DeclaredHttp({"url": url, "query": {"b": "{{ message.chat_id }}"}}, TIMEOUT)
        await channel.send(build_message())
    assert api.calls[0].target == "/hook?a=1&b=c1"


async def test_declared_named_lines_are_values():
    api = Api()
    body = {"vars": {"name": "{{ values.name }}", "code": "{{ values.code }}"}}

    await sent(api, {"body": body}, body="name: 爱丽丝\ncode：7")
    missing = await sent(api, {"body": body}, body="name: 爱丽丝")

    assert api.calls[0].json == {"vars": {"name": "爱丽丝", "code": "7"}}
    assert (type(missing), getattr(missing, "reason", "")) == (Permanent, "bad_content")
    assert len(api.calls) == 1


@each_row(
    "verdict, expected",
    [
        ({"status": {"code": "OK"}}, Delivered('{"status": {"code": "OK"}}', 200)),
        ({"status": {"code": 429, "text": "x"}}, Transient("vendor_429", "太快（429：x）", timedelta(minutes=2), 200)),
        ({"status": {"code": "BUSY"}}, Transient("vendor_BUSY", "（BUSY）", timedelta(seconds=30), 200)),
        ({"status": {"code": "NO_NUMBER"}}, Permanent("vendor_NO_NUMBER", "（NO_NUMBER）", 200, disable_target=True)),
        ({"status": {"code": "MAYBE"}}, Unknown("vendor_MAYBE", "（MAYBE）")),
        ({"status": {"code": "new"}}, Transient("vendor_other", '{"status": {"code": "new"}}', None, 200)),
        ({"status": {"code": True}}, Transient("vendor_other", '{"status": {"code": true}}', None, 200)),
        (b"<html>", Unknown("garbled", "<html>")),
        (b'{"status": {"code": 0' + b" " * 70_000 + b"}}", None),
    ],
)  # fmt: skip
async def test_declared_answer_determines_outcome(verdict, expected):
    outcome = await sent(Api(verdict))
    if expected is None:
        assert isinstance(outcome, Unknown), outcome
    else:
        assert outcome == expected


@each_row(
    "verdict, expected",
    [
        (b"", Unknown("garbled", "")),
        (b"<html>", Unknown("garbled", "<html>")),
        (b"[]", Unknown("garbled", "[]")),
        (b'{"id": 1', Unknown("garbled", '{"id": 1')),
        (b'{"id": 1}' + b" " * 70_000, None),  # readable, but the rest is cut
        (b"{}", Delivered("{}", 200)),  # an object, although an empty one
        (b'{"id": 1}', Delivered('{"id": 1}', 200)),
        (b'{"error": "new"}', Transient("vendor_other", '{"error": "new"}', None, 200)),
    ],
)
async def test_declared_absent_field_counts_in_a_readable_answer_only(verdict, expected):
    changes = {"success": {"field": "error", "op": "absent"}, "code_field": "", "errors": None}
    outcome = await sent(Api(verdict), changes)
    if expected is None:
        assert (type(outcome), getattr(outcome, "reason", "")) == (Unknown, "garbled")
    else:
        assert outcome == expected


async def test_declared_truth_value_is_a_code():
    changes = {"success": None, "code_field": "ok", "errors": [{"code": False, "then": "permanent"}]}
    outcome = await sent(Api({"ok": False}), changes)
    assert outcome == Permanent("vendor_false", "（false）", 200)
    assert isinstance(await sent(Api({"ok": True}), changes), Delivered)


@each_row(
    "raw, repeatable, expected",
    [
        (reply(500, b"oops"), False, Unknown("http_500", "oops")),
        (reply(500, b"oops"), True, Transient("http_500", "oops", None, 500)),
        (
            reply(400, b'{"status": {"code": "BUSY"}}'),
            False,
            Transient("vendor_BUSY", "（BUSY）", timedelta(seconds=30), 400),
        ),
        (reply(410, b"gone"), False, Permanent("gone", "gone", 410, disable_target=True)),
        (reply(201, b"<html>"), False, Unknown("garbled", "<html>")),
    ],
)
async def test_declared_status_counts_beside_the_table(raw, repeatable, expected):
    plain = {"token": None, "query": {}}
    assert await sent(always(raw), plain, repeatable=repeatable) == expected


async def test_declared_expired_token_is_refreshed_once(token_server):
    api = Api()
    async with Receiver(api) as receiver:
        base = receiver.url.removesuffix("/hook")
        token = CONFIG["token"] | {"url": f"{base}/token"}
        channel = DeclaredHttp(CONFIG | {"url": f"{base}/send", "token": token}, TIMEOUT)
        letter = build_message(target={"address": "1"}, repeatable=False)
        await channel.send(letter)
        age_tokens(token_server)
        api.accepts = "token-number-2"
        outcomes = await asyncio.gather(*(channel.send(letter) for _ in range(20)))
        assert {type(outcome) for outcome in outcomes} == {Delivered}
        api.accepts = "none"
        refused = await channel.send(letter)

    assert len(api.fetches) == 2
    assert isinstance(refused, Transient), refused
    assert "token-number" not in refused.detail


async def test_declared_answer_that_repeats_secrets_is_masked():
    for echo in (f"{SECRET} token-number-1", f"{'x' * 955} {SECRET}"):  # the second is cut within the secret
        outcome = await sent(Api({"status": {"code": "OK"}, "echo": echo}))
        assert isinstance(outcome, Delivered)
        assert SECRET[:4] not in outcome.reply
        assert "token-number" not in outcome.reply


async def test_declared_channels_that_differ_in_the_token_request_share_no_token():
    used = []

    async def answer(request, writer):
        path = urlsplit(request.target)
        if path.path == "/token":
            writer.write(reply(200, json.dumps({"access_token": f"token-of-{request.json['scope']}"}).encode()))
        else:
            used.extend(parse_qs(path.query)["access_token"])
            writer.write(reply(200, b"{}"))

    async with Receiver(answer) as receiver:
        for scope in ("brand-a", "brand-b"):
            await _send_with_token(receiver, scope)
    assert used == ["token-of-brand-a", "token-of-brand-b"]


async def test_declared_token_under_another_name_is_not_in_the_detail():
    body = {"errcode": 0, "data": {"token": "REAL-ACCESS-TOKEN"}, "token": "REAL-ACCESS-TOKEN"}
    async with Receiver(always(reply(200, json.dumps(body).encode()))) as receiver:
        outcome = await _send_with_token(receiver, "x")
    assert isinstance(outcome, Transient)
    assert outcome.detail == "HTTP 200: no access_token among: data, errcode, token. errcode 0"


async def _send_with_token(receiver, scope):
    base = receiver.url.removesuffix("/hook")
    token = {"url": f"{base}/token", "body": {"scope": scope}}
    config = {"url": f"{base}/send", "query": {"access_token": "{{ channel.token }}"}, "token": token}
    message = build_message(target={})
    return await DeclaredHttp(config, TIMEOUT).send(message)


def test_declared_quotas_count_by_address_or_account():
    config = CONFIG | {"url": "https://sms.example.com/", "quotas": ["1/1m", "5/1h"], "token": None, "query": {}}
    config = {name: value for name, value in config.items() if value is not None}
    messages = [build_message(target={"address": each}) for each in ("1", "2")]

    by_address, by_account = DeclaredHttp(config, TIMEOUT), DeclaredHttp(config | {"quota_by": "account"}, TIMEOUT)

    assert by_address.quotas == (Quota(1, timedelta(minutes=1)), Quota(5, timedelta(hours=1)))
    assert len({receiver_key(by_address, message) for message in messages}) == 2
    assert len({receiver_key(by_account, message) for message in messages}) == 1


@each_row(
    "changes, problem",
    [
        ({"url": "http://169.254.169.254/"}, "url: "),
        ({"method": "DELETE"}, "method: must be one of"),
        ({"body": "text"}, "body: must be a mapping or a list"),
        ({"body": {"a": {"b": ["{{ user.name }}"]}}}, "body.a.b.0: line 1: unknown variable “user”"),
        ({"body": {"a": "{{ message.colour }}"}}, "body.a: line 1: unknown variable “message.colour”"),
        ({"body": [[[[[[[[[["deep"]]]]]]]]]]}, "body.0"),
        ({"body": {str(n): "x" for n in range(300)}}, "body."),
        ({"query": {"a": {"b": 1}}}, "query.a: must be text or a number"),
        ({"headers": {"Host": "internal"}}, "headers.Host: "),
        ({"token": None}, "token: is missing"),
        ({"token": {"url": "https://169.254.169.254/"}}, "token.url: "),
        ({"token": {"url": "https://example.com/", "lifetime": "soon"}}, "token.lifetime: "),
        ({"token": {"url": "https://example.com/", "body": {"a": "{{ message.body }}"}}}, "token.body.a: line 1"),
        ({"success": {"field": "code", "op": "like", "value": 1}}, "success.op: must be one of"),
        ({"success": {"field": "code", "op": "in", "value": 1}}, "success.value: must be a list"),
        ({"success": {"op": "eq", "value": 1}}, "success.field: is missing"),
        ({"errors": [{"code": 1}]}, "errors.0.then: must be one of"),
        ({"errors": [{"code": 1, "then": "retry"}, {"code": "1", "then": "quota"}]}, "errors.1.code: “1” is"),
        ({"errors": [{"code": 1, "then": "retry", "after": "soon"}]}, "errors.0.after: "),
        ({"code_field": ""}, "code_field: is missing"),
    ],
)  # fmt: skip
def test_declared_setting_errors_name_the_field(changes, problem):
    config = CONFIG | {"url": "https://sms.example.com/", "token": CONFIG["token"] | {"url": "https://a.example.com/"}}
    config = {name: value for name, value in (config | changes).items() if value is not None}
    with pytest.raises(ValueError, match="^" + re.escape(problem)):
        DeclaredHttp(config, TIMEOUT)
