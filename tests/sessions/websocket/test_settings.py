"""Who may see the demo page, and what the log keeps to itself."""

import logging

import pytest
from django.contrib.auth.models import User
from django.test import Client
from django.urls import resolve

from config.settings.logging import WithoutTokens
from scheduling.models import Customer
from sessions import tokens
from sessions.models import SilencePolicy

PAGE, START, STATE = "/demo/chat/", "/demo/chat/start", "/demo/chat/state"


@pytest.fixture
def in_production(settings, tmp_path, initial_rows):
    resolve(PAGE)  # the addresses are loaded once in a process, and other tests need those of the demo
    settings.AFTERTOUCH_DEMO = False
    settings.STATIC_ROOT = tmp_path


@pytest.mark.django_db(transaction=True)
@pytest.mark.usefixtures("in_production")
def test_demo_chat_outside_demo_returns_404():
    stranger, staff, root = Client(), Client(), Client()
    staff.force_login(User.objects.create_user("ops", is_staff=True))
    root.force_login(User.objects.create_superuser("root"))
    for visitor in (stranger, staff, root):
        assert visitor.get(PAGE).status_code == 404
        assert visitor.post(START, {"tag": "default"}).status_code == 404
        assert visitor.get(STATE, {"session": "demo-abcdef"}).status_code == 404
    assert not SilencePolicy.objects.filter(key="demo").exists()
    assert not Customer.objects.exists()


@pytest.mark.django_db(transaction=True)
@pytest.mark.usefixtures("initial_rows")
def test_demo_chat_refuses_other_sessions():
    visitor = Client()
    visitor.get(PAGE)
    for session in ("s1", "demo-", "demo-a/b-c-d", "x-demo-abcdef"):
        assert visitor.post(START, {"tag": "demo", "session": session}).status_code == 422
        assert visitor.get(STATE, {"session": session}).status_code == 422
    told = visitor.post(START, {"tag": "demo"}).json()
    again = visitor.post(START, {"tag": "demo", "session": told["session"]}).json()
    assert (again["session"], again["user"]) == (told["session"], told["user"])
    admission = tokens.verify_token(again["tokens"]["agent"], told["session"])
    assert (admission.user_id, admission.role, admission.tag) == (told["user"], "agent", "demo")


def test_log_filter_removes_websocket_token():
    words = ("127.0.0.1:1", "/ws/v1/sessions/s1?cursor=0&token=abc:def-_.~&x=1")
    record = logging.LogRecord("uvicorn.error", logging.INFO, "", 0, '%s - "WebSocket %s" [accepted]', words, None)
    assert WithoutTokens().filter(record)
    assert record.getMessage() == '127.0.0.1:1 - "WebSocket /ws/v1/sessions/s1?cursor=0&token=…&x=1" [accepted]'


def test_log_filter_removes_callback_token():
    words = ("127.0.0.1:1", "POST", "/hooks/sms/0123456789abcdef?x=1", "1.1", 200)
    record = logging.LogRecord("uvicorn.access", logging.INFO, "", 0, '%s - "%s %s HTTP/%s" %d', words, None)
    assert WithoutTokens().filter(record)
    assert record.getMessage() == '127.0.0.1:1 - "POST /hooks/sms/…?x=1 HTTP/1.1" 200'
