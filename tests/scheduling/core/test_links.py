"""Links of texts: found, rewritten to signed redirects, and found again in the stored text."""

import pytest
from django.core.signing import BadSignature

from scheduling.delivery.links import find_link, make_link_token, read_link_token, rewrite_links
from scheduling.ids import new_id
from scheduling.models import ChannelConfig, Community
from tests.scheduling.channels.http_receivers import MessageFactory
from tests.scheduling.core.conftest import deliver_when_due
from tests.support.tables import each_row

BASE = "https://go.example.com"


@pytest.fixture(autouse=True)
def _with_links(settings):
    settings.AFTERTOUCH_LINK_BASE_URL = f"{BASE}/"
    settings.AFTERTOUCH_BASE_URL = "https://aftertouch.example"


@each_row(
    "text, links",
    [
        ("看 https://a.cn/x?y=1&z=2，谢谢", ["https://a.cn/x?y=1&z=2"]),
        ("[指南](https://a.cn/x)[价格](http://b.cn/y)", ["https://a.cn/x", "http://b.cn/y"]),
        ("<https://a.cn/x>", ["https://a.cn/x"]),
        ("See https://a.cn/wiki/A_(b). Or https://b.cn!", ["https://a.cn/wiki/A_(b)", "https://b.cn"]),
        ("**https://a.cn/x**", ["https://a.cn/x"]),
        ("HTTPS://A.CN/X", ["HTTPS://A.CN/X"]),
        ("https://a.cn/搜索 https://a.cn/x点击", []),  # where the address ends is not known
        ("https://a.cn/x（点击）", ["https://a.cn/x"]),
        ("ftp://a.cn javascript://a.cn https:// a.cn", []),
    ],
)
def test_links_of_a_text_are_replaced_and_found_again(text, links):
    message = MessageFactory().message(body=text)
    changed = rewrite_links(message).body
    tokens = [f"{BASE}/l/{make_link_token(message.delivery_key, number)}" for number in range(len(links))]
    expected = text
    for link, token in zip(links, tokens, strict=True):
        expected = expected.replace(link, token, 1)
    assert changed == expected
    assert [find_link(text, number) for number in range(len(links) + 1)] == [*links, ""]


def test_link_of_html_leads_where_its_reader_expects():
    assert find_link('<a href="https://a.cn/x?y=1&amp;z=2&copy=3">guide</a>', 0) == "https://a.cn/x?y=1&z=2&copy=3"


def test_own_links_stay_and_keep_the_numbers_of_others():
    text = f"https://aftertouch.example/u/token {BASE}/l/abc https://a.cn/x"
    message = MessageFactory().message(body=text)
    token = make_link_token(message.delivery_key, 2)
    assert rewrite_links(message).body == text.replace("https://a.cn/x", f"{BASE}/l/{token}")
    assert find_link(text, 2) == "https://a.cn/x"


def test_text_with_10_000_links_keeps_the_further_ones():
    text = " ".join(["https://a.cn/x"] * 10_000)
    assert rewrite_links(MessageFactory().message(body=text)).body.count("https://a.cn/x") == 9_800


def test_token_of_another_key_or_changed_token_is_refused(settings):
    key = new_id()
    token = make_link_token(key, 7)
    assert read_link_token(token) == (key, 7)
    for place in range(len(token)):
        other = "A" if token[place] != "A" else "B"
        with pytest.raises(BadSignature):
            read_link_token(token[:place] + other + token[place + 1 :])
    for wrong in ("", "x", token + "A", token[:-1], "é" * 36, token + "\n"):
        with pytest.raises(BadSignature):
            read_link_token(wrong)
    settings.SECRET_KEY_FALLBACKS, settings.SECRET_KEY = [settings.SECRET_KEY], "another-secret-key-of-this-site"
    assert read_link_token(token) == (key, 7)
    settings.SECRET_KEY_FALLBACKS = []
    with pytest.raises(BadSignature):
        read_link_token(token)


@pytest.mark.django_db(transaction=True)
def test_sent_text_has_redirects_and_the_stored_one_has_the_links(shop, hook, receiver):
    shop.node(channel=hook, template=shop.template("guide", body="看 {{ event.data.url }}"))
    row = deliver_when_due(*shop.record_event(data={"url": "https://a.cn/x"}).task_ids)[0]
    assert receiver.calls[0].json["data"]["body"] == f"看 {BASE}/l/{make_link_token(row.root_id, 0)}"
    assert row.attempts[0].body == "看 https://a.cn/x"


@pytest.mark.django_db(transaction=True)
@pytest.mark.parametrize("why", ["template", "setting", "robot"])
def test_links_stay_where_the_feature_is_off(shop, hook, receiver, settings, why):
    channel = hook
    if why == "setting":
        settings.AFTERTOUCH_LINK_BASE_URL = ""
    if why == "robot":
        channel = ChannelConfig.objects.create(key="wecom", kind="wecom", config={})
        Community.objects.create(chat_id="c1", targets={"wecom": {"url": receiver.url}})
    template = shop.template("guide", body="https://a.cn/x", tracks_links=why != "template")
    shop.node(channel=channel, template=template)
    deliver_when_due(*shop.record_event(chat_id="c1").task_ids)
    assert "https://a.cn/x" in str(receiver.calls[0].json)
