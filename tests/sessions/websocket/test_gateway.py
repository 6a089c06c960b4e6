"""The stream of a gateway: acknowledgements, repeats, back-pressure, keys, and killed web processes."""

import asyncio
import json
from collections import Counter

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer
from django.utils.timezone import now
from websockets.sync.client import connect

from examples.gateway_client import GatewayClient, StreamEnded
from scheduling.models import ApiKey
from scheduling.operations import commands
from sessions.store.sessions import live_store
from sessions.websocket import gateway
from sessions.websocket.gateway import GatewayConsumer
from tests.scheduling.api.serving import address_of, listening, web_on
from tests.sessions.refusing_server import REFUSALS, refuse_writes
from tests.sessions.websocket.test_catch_up import RecordedSocket
from tests.sessions.websocket.test_limits import held_writer, run, until
from tests.sessions.websocket.web_processes import Page
from tests.support.tables import each_row
from tests.support.waiting import WAIT_LIMIT

pytestmark = pytest.mark.django_db(transaction=True)
__all__ = ["held_writer"]

ANN = {"session_id": "s1", "user_id": "ann", "kind": "message"}


class Stream(Page):
    def __init__(self, address, key):
        self.socket = connect(
            f"ws://{address}/ws/v1/gateway", open_timeout=WAIT_LIMIT, compression=None,
            additional_headers={"Authorization": f"Bearer {key}"},
        ).__enter__()  # fmt: skip

    def send_batch(self, n, frames):
        self.socket.send(json.dumps({"n": n, "frames": frames}))


@pytest.fixture
def open_stream(address, initial_rows):
    opened = []

    def open_stream(key=""):
        opened.append(Stream(address, key or commands.create_api_key(f"gateway {len(opened)}", ["sessions"])))
        return opened[-1]

    yield open_stream
    for each in opened:
        each.socket.close()


def test_batches_are_acknowledged_with_their_outcomes(open_stream):
    stream = open_stream()
    assert stream.receive() == {"type": "welcome", "most_frames": 500}
    bob = {"session_id": "s2", "user_id": "bob"}
    stream.send_batch(5, [ANN | {"seq": 1}, bob | {"from": "agent", "kind": "ping"}, ANN | {"seq": 1}])
    stream.send_batch(9, [ANN | {"kind": "shout"}, ANN | {"user_id": "eve"}, ANN | {"knd": "ping"}, 7, bob])
    stream.send_batch(10, [])
    assert stream.receive() == {"type": "ack", "n": 5, "counted": 1, "dropped": 1, "idle": 1, "refused": []}
    answer = stream.receive()
    assert (answer["n"], answer["counted"], stream.receive()["n"]) == (9, 1, 10)
    refused = {each["place"]: each["errors"][0]["field"] for each in answer["refused"]}
    assert refused == {0: "kind", 1: "user_id", 2: "knd", 3: "frame"}


@each_row(
    "text",
    ['{"n": 3, "frames": []}', '{"n": "4", "frames": []}', '{"n": 4}', "[]", "x", '{"n": 4, "x": "\\u0000"}',
     json.dumps({"n": 4, "frames": [ANN] * 501})],
)  # fmt: skip
def test_invalid_batch_closes_stream(open_stream, text):
    stream = open_stream()
    stream.send_batch(3, [ANN])
    stream.receive_until("ack", n=3)
    stream.socket.send(text)
    assert stream.close_code()[0] == 4400


@each_row(
    "member",
    [{"session_id": 7}, {"user_id": None}, {"kind": []}, {"from": {}}, {"seq": True}, {"epoch": {}}, {"tags": 1},
     {"tags": None}, {"tags": ""}, {"tags": {}}, {"spoken": 1}],
)  # fmt: skip
def test_frame_with_member_of_wrong_type_is_refused(open_stream, member):
    stream = open_stream()
    stream.send_batch(1, [ANN | member, ANN])
    answer = stream.receive_until("ack")
    assert answer["counted"] == 1
    assert [(each["place"], each["errors"][0]["field"]) for each in answer["refused"]] == [(0, *member)]


def test_frame_that_cannot_be_stored_is_refused_alone(open_stream):
    """A gateway that lost its connection for it would send it again, for ever."""
    stream = open_stream()
    frames = [ANN | {"user_id": "\0"}, ANN, ANN | {"\ud800": 1}, ANN | {"tags": [2**70]}]
    stream.send_batch(1, frames)
    answer = stream.receive_until("ack")
    assert answer["counted"] == 1
    assert [(each["place"], each["errors"][0]["field"]) for each in answer["refused"]] == [
        (0, "user_id"), (2, "\ud800"), (3, "tags.0"),
    ]  # fmt: skip


def test_stream_needs_key_with_scope(open_stream):
    for key in ("unknown", commands.create_api_key("shop", ["events"])):
        assert open_stream(key).close_code()[0] == 4401


def test_stream_of_revoked_key_is_closed(open_stream):
    key = commands.create_api_key("short", ["sessions"])
    stream = open_stream(key)
    stream.receive_until("welcome")
    ApiKey.objects.filter(name="short").update(revoked_at=now())
    assert stream.close_code()[0] == 4401


def test_number_of_streams_of_a_key_is_limited(open_stream):
    key = commands.create_api_key("many", ["sessions"])
    for _ in range(gateway.MOST_STREAMS):
        open_stream(key).receive_until("welcome")
    assert open_stream(key).close_code()[0] == 4409
    open_stream().receive_until("welcome")


@pytest.mark.parametrize("code", REFUSALS)
def test_batch_that_redis_refuses_is_not_acknowledged(open_stream, valkey, code):
    stream, again = open_stream(), open_stream()
    with refuse_writes(valkey, code):
        stream.send_batch(1, [ANN | {"seq": 1}])
        assert stream.receive_until("welcome")
        assert stream.close_code()[0] == 1013
    again.send_batch(1, [ANN | {"seq": 1}])
    assert again.receive_until("ack")["counted"] == 1


def test_full_stream_is_not_read_until_frames_are_counted(initial_rows, held_writer, monkeypatch):
    monkeypatch.setattr(gateway, "MOST_COUNTING", 20)
    key = commands.create_api_key("gateway", ["sessions"])

    async def scene():
        wire, serving = RecordedSocket(), GatewayConsumer()
        headers = [(b"authorization", f"Bearer {key}".encode())]
        running = asyncio.create_task(serving({"headers": headers}, wire.said.get, wire.heard.put))
        for n in range(10):
            frames = [ANN | {"session_id": f"s{n}-{each}"} for each in range(10)]
            wire.said.put_nowait({"type": "websocket.receive", "text": json.dumps({"n": n, "frames": frames})})
        await until(lambda: getattr(serving, "counting", 0) == 20)
        for _ in range(20):
            await asyncio.sleep(0)
        assert (serving.counting, wire.said.qsize()) == (20, 8)
        held_writer.go_on.set()
        acknowledged = []
        while len(acknowledged) < 10:
            frame = json.loads((await wire.heard.get()).get("text", "{}"))
            if frame.get("type") == "ack":
                acknowledged.append(frame["n"])
        assert acknowledged == list(range(10))
        wire.said.put_nowait({"type": "websocket.disconnect"})
        await running

    run(scene)


@pytest.mark.parametrize("frames", [1, 0])
def test_many_small_batches_at_once_are_all_acknowledged(initial_rows, valkey, frames):
    """A gateway sends them without waiting for each acknowledgement, or again after a reconnect."""
    key = commands.create_api_key("gateway", ["sessions"])

    async def scene():
        wire, serving = RecordedSocket(), GatewayConsumer()
        headers = [(b"authorization", f"Bearer {key}".encode())]
        for n in range(200):
            batch = {"n": n, "frames": [ANN | {"session_id": f"s{n}"}] * frames}
            wire.said.put_nowait({"type": "websocket.receive", "text": json.dumps(batch)})
        running = asyncio.create_task(serving({"headers": headers}, wire.said.get, wire.heard.put))
        acknowledged = []
        while len(acknowledged) < 200:
            message = await wire.heard.get()
            assert message["type"] != "websocket.close", (message, len(acknowledged))
            frame = json.loads(message.get("text", "{}"))
            if frame.get("type") == "ack":
                acknowledged.append(frame["n"])
        assert acknowledged == list(range(200))
        wire.said.put_nowait({"type": "websocket.disconnect"})
        await running

    run(scene)


def test_same_frames_over_two_processes_count_once(open_stream, second_address):
    """A gateway repeats its batches while the process of its earlier connection still counts them."""
    key = commands.create_api_key("twice", ["sessions"])
    with Stream(second_address, key) as second:
        streams = [open_stream(key), second]
        for stream in streams:
            stream.receive_until("welcome")
        for n in range(10):
            frames = [ANN | {"session_id": f"s{each}", "seq": n, "epoch": 7} for each in range(200)]
            for stream in streams:
                stream.send_batch(n, frames)
        acks = [stream.receive_until("ack", n=n) for stream in streams for n in range(10)]
    assert sum(ack["counted"] + ack["dropped"] for ack in acks) == 4_000
    assert 200 <= sum(ack["counted"] for ack in acks) <= 2_000, "a frame that another one overtook is dropped"
    for n in range(10):
        streams[0].send_batch(100 + n, [ANN | {"session_id": "s1", "seq": n, "epoch": 7}])
        assert streams[0].receive_until("ack", n=100 + n)["dropped"] == 1


def test_killed_web_process_loses_no_acknowledged_frame(initial_rows, valkey):
    """Each session has one frame with a seq. A session that Redis does not know shows a lost frame."""
    key, epoch = commands.create_api_key("gateway", ["sessions"]), "run-1"
    batches = [
        [{"session_id": f"s{n}-{each}", "user_id": f"u{each}", "seq": 1, "epoch": epoch} for each in range(50)]
        for n in range(100)
    ]
    acks = []

    async def send_all(address):
        async with asyncio.timeout(WAIT_LIMIT), GatewayClient(f"http://{address}", key, acks.append) as client:
            for frames in batches:
                await client.send(frames)
            await client.flush()

    async def scene(listener, address):
        sending = asyncio.create_task(send_all(address))
        with web_on(listener) as web:
            while len(acks) < 20 and not sending.done():
                await asyncio.sleep(0.01)
            web.kill()
            web.wait()
        acknowledged = [ack["n"] for ack in acks]
        assert all(live_store().known([each["session_id"] for n in acknowledged for each in batches[n - 1]]))
        with web_on(listener):
            await sending
            first = Counter({name: sum(ack[name] for ack in acks) for name in ("counted", "dropped")})
            acks.clear()
            await send_all(address)
        assert first.total() == 5_000
        assert sum(ack["dropped"] for ack in acks) == 5_000, "each frame had counted once"

    with listening() as listener:
        asyncio.run(scene(listener, address_of(listener)))


async def send_one_batch(serve, then=GatewayClient.flush):
    application = web.Application()
    application.router.add_get("/ws/v1/gateway", serve)
    async with (
        asyncio.timeout(WAIT_LIMIT),
        TestServer(application) as server,
        GatewayClient(str(server.make_url("")), "key") as client,
    ):
        await client.send([ANN])
        await then(client)


def test_client_reconnects_if_pings_are_not_answered(monkeypatch):
    """As behind a firewall that has forgotten the connection."""
    monkeypatch.setattr("examples.gateway_client.PING_EVERY", 0.2)
    batches = []

    async def serve(request):
        socket = web.WebSocketResponse(autoping=bool(batches))
        await socket.prepare(request)
        batches.append(await socket.receive_str())
        if len(batches) == 1:
            await asyncio.Event().wait()
        await socket.send_json({"type": "ack", "n": json.loads(batches[-1])["n"]})
        await socket.receive()
        return socket

    asyncio.run(send_one_batch(serve))
    assert len(batches) == 2
    assert batches[0] == batches[1]


def test_end_of_the_stream_is_no_error_of_acknowledged_batches():
    async def serve(request):
        socket = web.WebSocketResponse()
        await socket.prepare(request)
        await socket.send_json({"type": "ack", "n": json.loads(await socket.receive_str())["n"]})
        await socket.close(code=4401)
        return socket

    async def scene(client):
        await client.flush()
        await client._task
        await client.flush()
        with pytest.raises(StreamEnded):
            await client.send([ANN])

    asyncio.run(send_one_batch(serve, scene))


def test_client_ends_with_an_answer_that_it_does_not_understand():
    """Otherwise its caller would wait without end."""

    async def serve(request):
        socket = web.WebSocketResponse()
        await socket.prepare(request)
        await socket.send_str("<html>")
        await socket.receive()
        return socket

    with pytest.raises(json.JSONDecodeError):
        asyncio.run(send_one_batch(serve))
