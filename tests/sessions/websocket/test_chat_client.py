"""The Python client against a real web process, which is killed under it."""

import asyncio

import aiohttp
import pytest

from examples.chat_client import ConnectionEnded, SessionClient
from scheduling.models import Event
from tests.scheduling.api.serving import Gate, cloud_event
from tests.sessions.websocket.web_processes import token
from tests.support.waiting import WAIT_LIMIT

pytestmark = pytest.mark.django_db(transaction=True)


@pytest.fixture(autouse=True)
def patient_client(monkeypatch):
    """A client that reconnects because the machine stalls repeats messages."""
    monkeypatch.setattr("examples.chat_client.ANSWER_TIMEOUT", WAIT_LIMIT)


async def new_token(role="agent"):
    return token(role=role)


async def next_frame(frames, type, **wanted):
    async with asyncio.timeout(WAIT_LIMIT):
        while True:
            frame = await anext(frames)
            if frame["type"] == type and all(frame.get(name) == value for name, value in wanted.items()):
                return frame


def test_client_sends_and_receives_messages_and_events(address, open_page):
    ann = open_page()

    async def gateway():
        async with SessionClient(f"http://{address}", "s1", new_token) as chat:
            await asyncio.wait_for(chat.connected.wait(), WAIT_LIMIT)
            frames = aiter(chat)
            name = await chat.message("hello")
            await next_frame(frames, "ack", id=name)
            await chat.sign("typing")
            await chat.event(cloud_event("e1"), id="x")
            assert (await next_frame(frames, "ack", id="x"))["event_id"] == "e1"
            await asyncio.to_thread(ann.send_frame, "message", text="hi")
            assert (await next_frame(frames, "message", **{"from": "user"}))["text"] == "hi"

    asyncio.run(gateway())
    assert ann.receive_until("message")["text"] == "hello"
    ann.receive_until("typing")
    assert Event.objects.filter(event_id="e1").exists()


def test_client_after_lost_connection_sends_each_message_once(address, open_page):
    """Its connection is cut; both sides write during that time."""
    ann = open_page()
    gate = Gate(int(address.split(":")[1]))

    async def gateway():
        heard = []
        async with SessionClient(f"http://127.0.0.1:{gate.port}", "s1", new_token) as chat:
            await asyncio.wait_for(chat.connected.wait(), WAIT_LIMIT)
            frames = aiter(chat)
            await next_frame(frames, "ack", id=await chat.message("one"))
            await asyncio.to_thread(gate.shut)
            await chat.message("two")
            await asyncio.to_thread(ann.send_frame, "message", text="while you were away")
            await asyncio.to_thread(gate.open)
            while len(heard) < 3:
                heard.append((await next_frame(frames, "message"))["text"])
        return heard

    try:
        assert sorted(asyncio.run(gateway())) == ["one", "two", "while you were away"]
    finally:
        gate.shut()
    assert sorted(ann.receive_until("message")["text"] for _ in range(3)) == ["one", "two", "while you were away"]
    assert not [frame for frame in ann.received_frames() if frame["type"] == "message"]


def test_client_keeps_order_while_reconnecting(address, open_page):
    """An earlier seq that came later would be ignored."""
    bob = open_page(role="agent")

    async def gateway():
        async with SessionClient(f"http://{address}", "s1", lambda: new_token("user")) as chat:
            for number in range(3):
                await chat.message(f"before {number}", seq=number)
            async with asyncio.timeout(WAIT_LIMIT):
                while chat._socket is None:
                    await asyncio.sleep(0)
                last = await chat.message("while it comes in", seq=3)
                await next_frame(aiter(chat), "ack", id=last)
                assert not chat._unacknowledged

    asyncio.run(gateway())
    heard = [bob.receive_until("message") for _ in range(4)]
    assert [frame["text"] for frame in heard] == ["before 0", "before 1", "before 2", "while it comes in"]
    assert [frame["seq"] for frame in heard] == [0, 1, 2, 3]  # none had been sent before


def test_client_repeats_messages_within_server_rate(address, initial_rows):
    """Each reconnect would be refused."""

    async def gateway():
        async with SessionClient(f"http://{address}", "s1", new_token) as chat:
            said = {await chat.message(f"while away {number}", seq=number) for number in range(80)}
            async with asyncio.timeout(WAIT_LIMIT):
                async for frame in chat:
                    said -= {frame["id"]} if frame["type"] == "ack" else set()
                    if not said:
                        return

    asyncio.run(gateway())


@pytest.mark.parametrize("reconnects", [False, True])
def test_client_resends_unstored_message_after_later_seq(address, open_page, reconnects):
    bob = open_page(role="agent")

    async def gateway():
        async with SessionClient(f"http://{address}", "s1", lambda: new_token("user")) as chat:
            frames = aiter(chat)
            await asyncio.wait_for(chat.connected.wait(), WAIT_LIMIT)
            name = await not_stored(chat, "one", seq=1)
            await next_frame(frames, "ack", id=await chat.message("two", seq=2))
            if reconnects:
                assert chat._socket is not None
                await chat._socket.close()
            else:
                await chat._handle_frame({"type": "error", "id": name, "reason": "unavailable"})
            await next_frame(frames, "ack", id=name)

    asyncio.run(gateway())
    assert [bob.receive_until("message")["text"] for _ in range(2)] == ["two", "one"]


async def not_stored(chat, text, seq):
    """Make Redis unavailable for this call when it arrives."""

    async def lost(_): ...

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(chat._socket, "send_str", lost)
        while not chat._in_order:
            await asyncio.sleep(0)
        return await chat.message(text, seq=seq)


def test_client_drops_refused_messages(address, initial_rows):
    async def gateway():
        async with SessionClient(f"http://{address}", "s1", lambda: new_token("user")) as chat:
            frames = aiter(chat)
            await next_frame(frames, "ack", id=await chat.message("two", seq=2))
            for text, reason in (("one", "replayed"), (" ", "invalid")):
                name = await chat.message(text, seq=1)
                assert (await next_frame(frames, "error", id=name))["reason"] == reason
            assert not chat._unacknowledged

    asyncio.run(gateway())


def test_client_reconnects_without_limit(monkeypatch):
    monkeypatch.setattr("examples.chat_client.LONGEST_PAUSE", 0)
    tries = 0

    async def gateway():
        often = asyncio.Event()

        async def away():
            nonlocal tries
            tries += 1
            if tries > 1_100:
                often.set()
            raise aiohttp.ClientError

        async with SessionClient("http://127.0.0.1:9", "s1", away):
            await asyncio.wait_for(often.wait(), WAIT_LIMIT)

    asyncio.run(gateway())


def test_client_raises_error_of_token_function():
    async def odd():
        raise KeyError("no token in the answer")

    async def gateway():
        async with SessionClient("http://127.0.0.1:9", "s1", odd) as chat, asyncio.timeout(WAIT_LIMIT):
            async for _ in chat:
                pass

    with pytest.raises(KeyError, match="no token"):
        asyncio.run(gateway())


def test_client_ends_when_session_is_closed(address, open_page):
    async def gateway():
        async with SessionClient(f"http://{address}", "s1", new_token) as chat:
            await asyncio.wait_for(chat.connected.wait(), WAIT_LIMIT)
            await chat.close_session()
            async with asyncio.timeout(WAIT_LIMIT):
                return [frame async for frame in chat]

    assert asyncio.run(gateway()) == []


def test_client_raises_on_refused_frame(address, initial_rows):
    async def gateway():
        async with SessionClient(f"http://{address}", "s1", new_token) as chat:
            await asyncio.wait_for(chat.connected.wait(), WAIT_LIMIT)
            await chat.sign("shout")
            async with asyncio.timeout(WAIT_LIMIT):
                async for _ in chat:
                    pass

    with pytest.raises(ConnectionEnded, match="4400 unknown type"):
        asyncio.run(gateway())
