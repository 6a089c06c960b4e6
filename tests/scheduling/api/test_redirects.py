"""Redirects of links in messages: to the stored link only, and only persons click."""

import pytest
import requests

from scheduling.customers.erasure import continue_erasures
from scheduling.delivery.links import make_link_token
from scheduling.ids import new_id
from scheduling.models import Customer, DeliveryReceipt, Touch
from tests.scheduling.api.serving import cloud_event
from tests.scheduling.core.conftest import deliver_when_due
from tests.support.second_connection import run_concurrently
from tests.support.tables import each_row

pytestmark = pytest.mark.django_db(transaction=True)
PERSON = {"User-Agent": "Mozilla/5.0 (Linux; Android 14; CUBOT P80) AppleWebKit/537.36 MicroMessenger/8.0.49"}
BODY = "看 https://a.cn/x?y=1，或 https://b.cn"


@pytest.fixture
def sent(matrix, api):
    matrix.node(template=matrix.template("guide", body=BODY))
    api.event(cloud_event())
    return deliver_when_due(Touch.objects.get().pk)[0].pk


def click(server, token, method="GET", **headers):
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    return requests.request(method, f"{server}/l/{token}", headers=PERSON | named, allow_redirects=False, timeout=60)


def test_click_redirects_to_the_stored_link_and_is_recorded_once(server, sent):
    answers = run_concurrently(8, lambda number: click(server, make_link_token(sent, number % 2)))
    assert [each.status_code for each in answers] == [302] * 8
    assert {each.headers["Location"] for each in answers} == {"https://a.cn/x?y=1", "https://b.cn"}
    assert (answers[0].headers["Referrer-Policy"], answers[0].headers["X-Robots-Tag"]) == ("no-referrer", "noindex")
    assert "no-store" in answers[0].headers["Cache-Control"]
    assert DeliveryReceipt.objects.get().kind == "clicked"


@each_row(
    "headers",
    [
        {"User_Agent": "Slackbot-LinkExpanding 1.0 (+https://api.slack.com/robots)"},
        {"User_Agent": "DingTalkBot-LinkService/1.0 (+https://open-doc.dingtalk.com/microapp/faquestions/ftpfeu)"},
        {"User_Agent": "Mozilla/5.0 (compatible; Baiduspider/2.0; +http://www.baidu.com/search/spider.html)"},
        {"User_Agent": "mpcrawler"},
        {"User_Agent": "SkypeUriPreview Preview/0.5"},
        {"User_Agent": "python-requests/2.32"},
        {"User_Agent": ""},
        {"Sec_Purpose": "prefetch;prerender"},
        {"Purpose": "prefetch"},
        {"X_Purpose": "preview"},
        {"X_Moz": "prefetch"},
    ],
)
def test_prefetch_is_redirected_and_no_click(server, sent, headers):
    assert click(server, make_link_token(sent, 0), **headers).status_code == 302
    assert not DeliveryReceipt.objects.exists()


def test_forged_redirects_lead_nowhere(server, sent):
    """And only a GET is a click."""
    token = make_link_token(sent, 0)
    assert click(server, token, "HEAD").status_code == 302
    assert click(server, token, "POST").status_code in (403, 405)
    forged = [
        token[:-1] + ("A" if token[-1] != "A" else "B"),
        make_link_token(sent, 2),  # the text has two links
        make_link_token(new_id(), 0),
        "https:%2F%2Fevil.example",
        "%2F%2Fevil.example",
        "x" * 36,
        "x" * 5_000,
        "%00",
        "é" * 36,
    ]
    for each in forged:
        answer = click(server, each)
        assert answer.status_code in (400, 404), (each, answer.status_code)
        assert "evil.example" not in answer.headers.get("Location", "")
    assert not DeliveryReceipt.objects.exists()


def test_click_before_the_end_of_the_touch_is_asked_again(server, matrix, api):
    matrix.node()
    api.event(cloud_event())
    answer = click(server, make_link_token(Touch.objects.get().pk, 0))
    assert (answer.status_code, answer.headers["Refresh"]) == (503, "1")


def test_erasure_ends_the_redirect(server, sent, api):
    assert Customer.objects.filter(user_id="ann").exists()
    api("DELETE", "/customers/ann")
    continue_erasures()
    assert click(server, make_link_token(sent, 0)).status_code == 404
