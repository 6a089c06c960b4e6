"""Values of customers and events add no markup to a message; the author's markup stays."""

import json
from datetime import UTC, datetime, timedelta

from scheduling.channels.base import channel_kinds
from scheduling.channels.markup import escape_markdown, escape_mentions
from scheduling.channels.vendors.declared import DeclaredHttp
from scheduling.policy.specs import CustomerSpec, EventSpec, TextSpec
from scheduling.templating import render_message
from tests.scheduling.channels.http_receivers import build_message
from tests.scheduling.core.sample_data import ann, event, template
from tests.support.tables import each_row

NOW = datetime(2026, 3, 3, tzinfo=UTC)
TAG, LINK, LINES = '<at user_id="all">', "**[a](https://x.example/?b=c_d)**`", "a\r\nurl: x\u2028b"
WIDE_TAG, WIDE_LINK = '＜at user_id="all"＞', "＊＊［a］(https://x.example/?b=c_d)＊＊｀"
WECOM_APP = {"corp_id": "ww1", "agent_id": 7, "secret": "s"}
URL = {"url": "https://example.com/"}

#: kind, settings, value, how a body prints it
ESCAPED = [
    *((kind, {}, TAG + LINK, WIDE_TAG + LINK) for kind in ("feishu", "wecom", "dingtalk")),
    *((kind, {"format": form}, TAG + LINK, WIDE_TAG + WIDE_LINK) for kind in ("feishu", "wecom", "dingtalk")
      for form in ("markdown", "card")),
    *((kind, {"mentions": True}, value, shown) for kind in ("feishu", "wecom", "dingtalk")
      for value, shown in (("x\n@all", "x\n＠all"), (" All ", " All \u200b"), ("zhangsan", "zhangsan"))),
    ("wecom_app", WECOM_APP, TAG + LINK, WIDE_TAG + LINK),
    ("wecom_app", WECOM_APP | {"format": "card"}, TAG + LINK, WIDE_TAG + WIDE_LINK),
    ("wechat_kf", {"corp_id": "ww1", "open_kfid": "wk1", "secret": "s"}, "<a href=x>", "＜a href=x＞"),
    ("sms_aliyun", {"access_key_id": "a", "sign_name": "n", "secret": "s"}, LINES, "a url: x b"),
    ("wechat_official", {"app_id": "wx1", "secret": "s"}, LINES, "a url: x b"),
    ("http", URL, TAG + LINES, TAG + LINES),
    ("http", URL | {"markup": "html"}, "<b>&", "&lt;b&gt;&amp;"),
    ("http", URL | {"markup": "markdown"}, LINK, WIDE_LINK),
    ("http", URL | {"body": {"a": "{{ values.a }}"}}, LINES, "a url: x b"),
    *((kind, config, TAG + LINES, TAG + LINES) for kind, config in
      (("log", {}), ("webhook", URL), ("inapp", {}), ("email", {"from": "a@example.com"}))),
]  # fmt: skip


def test_value_in_a_body_has_no_markup_of_the_channel():
    printed = []
    for kind, config, value, _ in ESCAPED:
        channel = channel_kinds()[kind](config, timedelta(seconds=5))
        body = render_message(template(body="{{ user.name }}"), ann(name=value), event(), channel.escape)[1]
        printed.append((kind, config, value, body))
    assert printed == ESCAPED


def test_address_in_a_value_leads_where_it_led():
    assert escape_markdown("https://x.example/?sig=ab*c&ids[]=1") == "https://x.example/?sig=ab%2Ac&ids%5B%5D=1"
    assert escape_mentions("https://x.example/@shop") == "https://x.example/%40shop"


@each_row("form", ["text", "card"])
def test_name_calls_no_group_and_the_author_does(form):
    feishu = channel_kinds()["feishu"]({"format": form}, timedelta(seconds=5))
    mark = '<at user_id="all"></at>' if form == "text" else "<at id=all></at>"
    texts = (TextSpec("en", "For {{ user.name }}", f"{mark} {{{{ user.name }}}}"),)
    subject, body, _ = render_message(template(texts=texts), ann(name=mark), event(), feishu.escape)
    message = build_message(subject=subject, body=body, target={"url": "https://open.feishu.cn/x"})
    document = feishu.build_document(message, NOW)
    posted = json.dumps(document if form == "text" else document["card"]["elements"], ensure_ascii=False)
    assert posted.replace('\\"', '"').count(mark) == 1


def test_value_mentions_no_one():
    """A value that is a whole last line, or follows an “@” of the author."""
    wecom = channel_kinds()["wecom"]({"mentions": True}, timedelta(seconds=5))
    for body, name in (
        ("hi\n{{ user.name }}", "@all"),
        ("hi\n@{{ user.name }}", "all"),
        ("{{ user.name }}", "a\n@all"),
    ):
        rendered = render_message(template(body=body), ann(name=name), event(), wecom.escape)[1]
        message = build_message(body=rendered, target={"url": "https://qyapi.weixin.qq.com/x"})
        assert "mentioned_list" not in wecom.build_document(message, NOW)["text"]


def test_header_of_a_declared_channel_stays_one_line():
    channel = DeclaredHttp(URL | {"headers": {"X-Who": "{{ message.user_id }}"}}, timedelta(seconds=5))
    request = channel.request(build_message(user_id="a\r\nX-Evil: 1"), "", NOW)
    assert request.headers["x-who"] == "a X-Evil: 1"


def test_customer_and_event_are_those_of_a_message():
    """Each root of a text is a value of the customer or the event, so each is escaped."""
    who = CustomerSpec(1, "<i>", "<n>", "<l>", "<o>", "")
    what = EventSpec(event().id, "<s>", "<e>", "<t>", NOW, "<i>", "<c>", {"x": "<d>"})
    body = "{{ user.id }}{{ user.name }}{{ user.level }}{{ user.locale }}{{ event.id }}{{ event.source }}"
    feishu = channel_kinds()["feishu"]({}, timedelta(seconds=5))
    said = render_message(
        template(body=body + "{{ event.type }}{{ event.data.x }}{{ chat.id }}"), who, what, feishu.escape
    )[1]
    assert "<" not in said
