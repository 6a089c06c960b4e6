"""A page that catches up during new messages: one consumer in this process, with controlled timing."""

import asyncio
import json
import threading

from sessions.store.inbox import Post
from sessions.store.sessions import Store, live_store
from sessions.websocket import hub
from sessions.websocket.consumer import SessionConsumer
from tests.sessions.websocket.web_processes import token
from tests.support.chat_hub import close_hub
from tests.support.waiting import WAIT_LIMIT


class Listening(SessionConsumer):
    """Signal each received frame."""

    def __init__(self):
        self.heard_it = asyncio.Event()

    def on_notification(self, told):
        super().on_notification(told)
        self.heard_it.set()


class RecordedSocket:
    """The other end of its connection."""

    def __init__(self):
        self.said = asyncio.Queue()
        self.heard = asyncio.Queue()
        self.said.put_nowait({"type": "websocket.connect"})

    async def texts(self, count):
        found = []
        while len(found) < count:
            message = await self.heard.get()
            frame = json.loads(message.get("text", "{}"))
            if frame.get("type") == "message":
                found.append(frame["text"])
        return found


def scope(session):
    return {
        "type": "websocket", "path": "", "headers": [], "query_string": f"token={token(session)}&cursor=0".encode(),
        "url_route": {"kwargs": {"session_id": session}},
    }  # fmt: skip


def test_message_during_empty_inbox_read_is_delivered(valkey, monkeypatch):
    """Without a ping: the read was empty, and another message was announced before the result arrived."""
    since, empty, go_on = Store.messages_since, threading.Event(), threading.Event()

    def held(self, *args):
        found = since(self, *args)
        if not found and not empty.is_set():
            empty.set()
            assert go_on.wait(WAIT_LIMIT)
        return found

    async def send_frame(text):
        post = Post("s1", text, "agent", text)
        (posted,) = await asyncio.to_thread(live_store().put_messages, [post])
        await hub.hub().notify("s1", hub.message_notification(post, posted))

    async def look():
        page, consumer = RecordedSocket(), Listening()
        await send_frame("before")
        running = asyncio.create_task(consumer(scope("s1"), page.said.get, page.heard.put))
        try:
            async with asyncio.timeout(WAIT_LIMIT):
                assert await asyncio.to_thread(empty.wait, WAIT_LIMIT)
                await send_frame("meanwhile")
                await consumer.heard_it.wait()
                go_on.set()
                return await page.texts(2)
        finally:
            go_on.set()
            page.said.put_nowait({"type": "websocket.disconnect"})
            await running
            await close_hub()

    monkeypatch.setattr(Store, "messages_since", held)
    assert asyncio.run(look()) == ["before", "meanwhile"]
