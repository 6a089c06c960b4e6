"""The channel `inapp`: into the open chat, once."""

import asyncio
from datetime import UTC, datetime, timedelta

import pytest

from scheduling.channels.base import Delivered, Message, Permanent, Unknown
from scheduling.ids import new_id
from scheduling.models import ChannelConfig
from sessions.frames import Frame
from sessions.inapp_channel import InApp
from sessions.store import sessions
from sessions.store.inbox import MAX_MESSAGES, MOST_KEYS, Post
from tests.scheduling.api.serving import NOWHERE
from tests.scheduling.core.conftest import deliver_when_due
from tests.support.chat_hub import close_hub

pytestmark = pytest.mark.django_db(transaction=True)


def message(user="ann", **changes):
    values = {
        "task_id": new_id(), "delivery_key": new_id(), "user_id": user, "chat_id": "c1", "node": "guide",
        "content_type": "guide", "category": "service", "subject": "", "body": "还在吗？", "locale": "zh-hans",
        "event": {"source": "/shop", "id": "e1", "type": "order.paid", "time": datetime.now(UTC)},
    }  # fmt: skip
    return Message(**(values | changes))


def send(*messages, seconds=10):
    """As the sender does: from one event loop, many at once."""
    channel = InApp({}, timedelta(seconds=seconds))

    async def all_of_them():
        found = await asyncio.gather(*(channel.send(each) for each in messages))
        await close_hub()  # this loop ends here
        return found

    return asyncio.run(all_of_them())


def texts(session="s1"):
    return [entry.frame() for entry in sessions.live_store().messages_since(session, "0-0")]


@pytest.fixture
def chat(initial_rows):
    def chat(session="s1", user="ann"):
        sessions.live_store().note_activity([Frame(session, user, "c1")])

    return chat


def test_inapp_message_reaches_user_and_agent(open_page):
    ann, bob = open_page(), open_page(role="agent")
    ann.send_frame("message", text="hi", id="m1")
    ann.receive_until("ack")
    (outcome,) = send(touch := message())
    assert isinstance(outcome, Delivered)
    for page in (ann, bob):
        heard = page.receive_until("message", **{"from": "system"})
        assert (heard["text"], heard["id"], heard["node"]) == ("还在吗？", str(touch.delivery_key), "guide")


def test_inapp_message_is_read_after_reconnect(open_page):
    ann = open_page()
    ann.send_frame("message", text="hi", id="m1")
    cursor = ann.receive_until("message")["cursor"]
    ann.socket.close()
    send(message())
    assert open_page(cursor=cursor).receive_until("message")["text"] == "还在吗？"


def test_inapp_retry_adds_no_second_message(open_page):
    ann = open_page()
    ann.send_frame("message", text="hi", id="m1")
    ann.receive_until("ack")
    touch = message()
    assert [type(outcome) for outcome in send(touch, touch) + send(touch)] == [Delivered] * 3
    ann.receive_until("message", id=str(touch.delivery_key))
    assert ann.received_frames() == []
    assert len(texts()) == 2


def test_concurrent_inapp_sends_with_one_key_store_one(chat):
    chat()
    send(*[message(delivery_key=new_id())] * 64)
    assert len(texts()) == 1


def test_inapp_send_without_session_fails_permanently(initial_rows):
    assert send(message("nobody")) == [Permanent("no_session", "the customer has no chat that is open")]


def test_inapp_send_to_closed_session_fails_permanently(chat):
    chat()
    sessions.live_store().close("s1", "ann")
    (outcome,) = send(message())
    assert isinstance(outcome, Permanent)
    assert texts() == []


def test_inapp_send_uses_session_of_the_silence(chat):
    chat("silent:1")
    chat("newer")
    event = {"source": "/sessions", "id": "silent:1:1700000000000000", "type": "session.silent", "time": None}
    send(message(event=event))
    assert (len(texts("silent:1")), len(texts("newer"))) == (1, 0)


def test_inapp_send_uses_session_of_customer_address(chat):
    chat("s1")
    chat("s2")
    send(message(target={"address": "s1"}), message())
    assert (len(texts("s1")), len(texts("s2"))) == (1, 1)


def test_inapp_send_to_session_of_other_user_fails_permanently(chat):
    """The address of a customer may outlive the session: a close drops the owner, the next user who writes owns it."""
    chat("s1", "ann")
    sessions.live_store().close("s1", "ann")
    chat("s1", "eve")
    event = {"source": "/sessions", "id": "s1:1700000000000000", "type": "session.silent", "time": None}
    refused = Permanent("no_session", "the customer has no chat that is open")
    assert send(message("ann", target={"address": "s1"}), message("ann", event=event)) == [refused] * 2
    assert texts("s1") == []


def test_inapp_retry_after_change_of_owner_is_delivered(chat):
    chat("s1", "ann")
    touch = message("ann", target={"address": "s1"})
    assert [type(each) for each in send(touch)] == [Delivered]
    sessions.live_store().close("s1", "ann")
    assert [type(each) for each in send(touch)] == [Delivered]
    chat("s1", "eve")
    assert [type(each) for each in send(touch)] == [Delivered]
    assert len(texts("s1")) == 1


def test_inbox_is_bounded_and_expires(chat):
    chat()
    posts = [Post("s1", f"m{number}", "system", "x" * 100, key=f"k{number}") for number in range(MOST_KEYS + 50)]
    sessions.live_store().put_messages(posts)
    assert len(sessions.live_store().messages_since("s1", "0-0", most=10_000)) == MAX_MESSAGES
    client = sessions.live_store().server.client
    names = [name for name in client.keys("*s1*") if b":in:" in name or b":once:" in name]
    assert len(names) == 2
    assert all(0 < client.pttl(name) <= 24 * 3600 * 1000 for name in names)
    assert max(client.zcard(name) for name in names if b":once:" in name) == MOST_KEYS


def test_inapp_send_without_redis_is_unknown(settings, initial_rows):
    settings.REDIS_URL = NOWHERE
    (outcome,) = send(message())
    assert isinstance(outcome, Unknown)


def test_inapp_touch_is_delivered_to_chat(chat, matrix, record_event):
    chat()
    matrix.node("paid", trigger="order.paid", channel=ChannelConfig.objects.create(key="chat", kind="inapp"),
                guard_conversation="ignore")  # fmt: skip
    (touch,) = deliver_when_due(*record_event("order.paid", "ann").task_ids)
    assert touch.state == "delivered"
    assert "hi" in texts()[0]
