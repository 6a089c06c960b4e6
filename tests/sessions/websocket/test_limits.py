"""What a web process holds for its connections is bounded, in both directions."""

import asyncio
import re
import threading
from contextlib import asynccontextmanager

import pytest
import redis
from redis.asyncio import ConnectionPool
from structlog.testing import capture_logs

from sessions.store.inbox import Post
from sessions.store.sessions import Store, live_store
from sessions.websocket import connection, consumer, hub
from sessions.websocket.connection import MOST_WAITING, Close, SendQueue
from sessions.websocket.consumer import SessionConsumer
from sessions.websocket.hub import Hub
from tests.sessions.websocket.test_catch_up import RecordedSocket, scope
from tests.support.chat_hub import close_hub
from tests.support.tables import each_row
from tests.support.waiting import WAIT_LIMIT


class Member:
    """A connection that stores received frames."""

    side, ticket = "user", 1

    def __init__(self):
        self.heard = []

    def on_notification(self, told):
        self.heard.append(told)

    @property
    def numbers(self):
        return [each["number"] for each in self.heard if each["what"] == hub.SIGN]


def run(scene):
    async def bounded():
        async with asyncio.timeout(WAIT_LIMIT):
            await scene()
        await close_hub()

    asyncio.run(bounded())


async def until(condition):
    while not condition():
        await asyncio.sleep(0.01)


# --- frames that come in ---


class HeldWriter:
    """The store, which notes nothing until `go_on` is set."""

    def __init__(self):
        self.go_on = threading.Event()
        self.noted = 0


@pytest.fixture
def held_writer(valkey, monkeypatch):
    held_writer, write = HeldWriter(), connection.write_frames

    def wait(store, slips):
        assert held_writer.go_on.wait(WAIT_LIMIT)
        held_writer.noted += len(slips)
        return write(store, slips)

    monkeypatch.setattr(connection, "write_frames", wait)
    monkeypatch.setattr(connection, "BURST", 10_000.0)
    yield held_writer
    held_writer.go_on.set()


@asynccontextmanager
async def page(session="s1"):
    wire, serving = RecordedSocket(), SessionConsumer()
    running = asyncio.create_task(serving(scope(session), wire.said.get, wire.heard.put))
    try:
        await until(lambda: getattr(serving, "cursor", None) is not None)
        yield wire, serving
    finally:
        wire.said.put_nowait({"type": "websocket.disconnect"})
        await running


async def send_frame(wire, count):
    for _ in range(count):
        wire.said.put_nowait({"type": "websocket.receive", "text": '{"type":"typing"}'})
    await until(wire.said.empty)


async def end_of(wire):
    while (message := await wire.heard.get())["type"] != "websocket.close":
        pass
    return message


def test_consumer_with_too_many_waiting_frames_closes(held_writer):
    async def scene():
        async with page() as (wire, serving), page("s2") as (_, other):
            await send_frame(wire, consumer.MOST_WAITING)
            await until(lambda: serving.waiting == consumer.MOST_WAITING)
            assert not serving.send_queue.ended
            await send_frame(wire, 1)
            end = await end_of(wire)
            assert (end["code"], end["reason"]) == (4429, "more than 100 frames wait to be noted")
            assert not other.send_queue.ended
            held_writer.go_on.set()
            await until(lambda: serving.waiting == 0)

    run(scene)
    assert held_writer.noted == 100


# --- messages that go out ---


def test_send_queue_with_too_many_frames_closes(valkey):
    sent = []

    async def scene():
        read_on = asyncio.Event()

        async def send(message):
            sent.append(message)
            await read_on.wait()

        outlet = SendQueue(send)
        outlet.put("the one that is being sent")
        await until(lambda: sent)
        for number in range(MOST_WAITING):
            outlet.put(f"{number}")
        assert not outlet.ended
        outlet.put("one too many")
        assert outlet.ended
        read_on.set()
        await until(lambda: len(sent) == 2)

    run(scene)
    assert (sent[1]["type"], sent[1]["code"]) == ("websocket.close", Close.TOO_SLOW)


def test_notify_above_limit_drops_latest(valkey, monkeypatch):
    monkeypatch.setattr(hub, "NOTIFY_QUEUE_LIMIT", 5)

    async def scene():
        member, here = Member(), hub.hub()
        await here.join("s1", member)
        told = [here.notify("s1", {"what": hub.SIGN, "number": number}) for number in range(8)]
        assert [each.done() for each in told] == [False] * 5 + [True] * 3
        await asyncio.gather(*told)
        await here.notify("s1", {"what": hub.SIGN, "number": 8})
        await until(lambda: 8 in member.numbers)
        assert member.numbers == [0, 1, 2, 3, 4, 8]

    run(scene)


@pytest.mark.parametrize("is_silent", [False, True])
def test_interrupted_subscription_notifies_every_connection(valkey, monkeypatch, is_silent):
    """Redis disconnects a subscriber that reads too slowly, or the connection is dead without an error."""

    async def scene():
        one, other, here = Member(), Member(), Hub()
        if is_silent:
            monkeypatch.setattr(hub, "PINGED_AFTER", 0.1)
            monkeypatch.setattr(hub, "DEAD_AFTER", 0.5)
        await here.join("s1", one)
        await here.join("s2", other)
        if is_silent:
            await asyncio.to_thread(valkey.client_pause, 1_000)
        else:
            await asyncio.to_thread(valkey.client_kill_filter, _type="pubsub")
        await until(lambda: {"what": hub.LOST} in one.heard and {"what": hub.LOST} in other.heard)
        monkeypatch.undo()
        await here.notify("s1", {"what": hub.SIGN, "number": 1})
        await until(lambda: one.numbers == [1])
        assert other.numbers == []
        await close_hub(here)

    run(scene)


@pytest.fixture
def permit_channels(valkey, settings):
    """Connect the hub as a user of Redis who may use channels or not."""

    def permit(permitted):
        return valkey.execute_command("ACL", "SETUSER", "web", "&*" if permitted else "resetchannels")

    valkey.execute_command("ACL", "SETUSER", "web", "reset", "on", ">s3cret", "~*", "+@all", "&*")
    settings.REDIS_URL = re.sub(r"//(.*@)?", "//web:s3cret@", settings.REDIS_URL)
    yield permit
    valkey.execute_command("ACL", "DELUSER", "web")


def test_refused_subscription_is_no_interruption(permit_channels, monkeypatch):
    """Each of them made every connection read its inbox, twice a second."""
    monkeypatch.setattr(hub, "RECONNECT_AFTER", 0.01)

    async def scene():
        member, here = Member(), Hub()
        await here.join("s1", member)
        with capture_logs() as logged:
            await asyncio.to_thread(permit_channels, False)  # Redis ends the connection
            await until(lambda: [each["event"] for each in logged].count("notifications_unavailable") >= 3)
        with pytest.raises(redis.RedisError):
            await here.join("s2", Member())
        assert member.heard == []
        await asyncio.to_thread(permit_channels, True)
        await until(lambda: member.heard)
        await here.notify("s1", {"what": hub.SIGN, "number": 1})
        await until(lambda: member.numbers)
        assert member.heard == [{"what": hub.LOST}, {"what": hub.SIGN, "number": 1}]
        await close_hub(here)

    run(scene)


def test_reader_resumes_when_a_joining_connection_subscribes(valkey, monkeypatch):
    """It slept on for its pause, and no task read the new subscription."""
    monkeypatch.setattr(hub, "RECONNECT_AFTER", 3600.0)
    monkeypatch.setattr(hub, "LONGEST_PAUSE", 3600.0)

    async def scene():
        one, other, here = Member(), Member(), Hub()
        await here.join("s1", one)
        await asyncio.to_thread(valkey.client_kill_filter, _type="pubsub")
        await until(lambda: here._subscription is None)
        await here.join("s2", other)
        await here.notify("s2", {"what": hub.SIGN, "number": 1})
        await until(lambda: other.numbers)
        assert one.heard == [{"what": hub.LOST}]
        await close_hub(here)

    run(scene)


@each_row("steady_after, longest", [(0.0, 0.02), (3600.0, 0.16)])
def test_pauses_grow_while_redis_ends_what_it_confirmed(valkey, monkeypatch, steady_after, longest):
    """Each subscription makes every connection read its inbox."""
    monkeypatch.setattr(hub, "RECONNECT_AFTER", 0.01)
    monkeypatch.setattr(hub, "STEADY_AFTER", steady_after)

    async def scene():
        member, here = Member(), Hub()
        await here.join("s1", member)
        for number in range(1, 5):
            await asyncio.to_thread(valkey.client_kill_filter, _type="pubsub")
            while len(member.heard) < number:
                await asyncio.sleep(0.01)
        assert longest / 2 <= here._pauses.next() <= longest
        await close_hub(here)

    run(scene)


@each_row("error, longest", [(redis.ConnectionError, 0.02), (TimeoutError, 0.02), (redis.ResponseError, 0.16)])
def test_pauses_grow_by_refusals_only(valkey, monkeypatch, error, longest):
    monkeypatch.setattr(hub, "RECONNECT_AFTER", 0.01)

    async def scene():
        member, here, tries = Member(), Hub(), 0
        await here.join("s1", member)
        connect = ConnectionPool.get_connection

        async def fail(pool):
            nonlocal tries
            tries += 1
            if tries <= 3:
                raise error("no")
            return await connect(pool)

        monkeypatch.setattr(ConnectionPool, "get_connection", fail)
        await asyncio.to_thread(valkey.client_kill_filter, _type="pubsub")
        await until(lambda: member.heard)
        assert longest / 2 <= here._pauses.next() <= longest
        await close_hub(here)

    run(scene)


def test_unexpected_error_at_the_end_of_a_subscription_opens_a_new_one(valkey, monkeypatch):
    async def scene():
        member, here = Member(), Hub()
        await here.join("s1", member)
        release = ConnectionPool.release

        async def fail(pool, connection):
            await release(pool, connection)
            raise AttributeError("of the client")

        monkeypatch.setattr(ConnectionPool, "release", fail)
        await asyncio.to_thread(valkey.client_kill_filter, _type="pubsub")
        await until(lambda: member.heard)
        monkeypatch.undo()
        await close_hub(here)

    run(scene)


def test_failing_connection_does_not_keep_a_notification_from_others(valkey):
    class Failing(Member):
        def on_notification(self, told):
            super().on_notification(told)
            raise LookupError

    async def scene():
        members, here = [Failing(), Failing()], Hub()
        for member in members:
            await here.join("s1", member)
        await here.notify("s1", {"what": hub.SIGN, "number": 1})
        await until(lambda: all(member.numbers for member in members))
        await close_hub(here)

    run(scene)


def test_invalid_notifications_are_skipped_and_logged_once(valkey):
    async def scene():
        member, here = Member(), Hub()
        await here.join("s1", member)
        with capture_logs() as logged:
            for _ in range(50):
                valkey.publish(f"{hub.CHANNEL}s1", "no JSON")
            await here.notify("s1", {"what": hub.SIGN, "number": 1})
            await until(lambda: member.numbers)
        assert [each["event"] for each in logged] == ["notification_invalid"]
        assert member.heard == [{"what": hub.SIGN, "number": 1}]
        await close_hub(here)

    run(scene)


def test_connection_that_joins_in_an_outage_fails_or_is_notified(valkey):
    """While other connections keep breaking the subscription."""

    async def scene():
        here, members = Hub(), [Member() for _ in range(20)]
        joined = []
        for number, member in enumerate(members):
            if number % 3 == 2:
                await asyncio.to_thread(valkey.client_kill_filter, _type="pubsub")
            try:
                await here.join(f"s{number}", member)
            except (redis.RedisError, OSError):
                continue
            joined.append((number, member))
        assert joined
        await until(lambda: here._subscription is not None)
        while not all(member.numbers for _, member in joined):
            for number, member in joined:
                if not member.numbers:
                    await here.notify(f"s{number}", {"what": hub.SIGN, "number": number})
            await asyncio.sleep(0.05)
        assert all(set(member.numbers) == {number} for number, member in joined)
        await close_hub(here)

    run(scene)


def test_interruption_before_the_welcome_frame_reads_the_inbox(valkey, monkeypatch):
    """A message that is stored after the last cursor was read, and whose notification is lost."""
    read = Store.read_cursor_and_owner

    async def scene():
        loop, wire, serving = asyncio.get_running_loop(), RecordedSocket(), SessionConsumer()

        def lose_message(self, session_id):
            found = read(self, session_id)
            self.put_messages([Post("s1", "m1", "agent", "not told")])
            loop.call_soon_threadsafe(serving.on_notification, {"what": hub.LOST})
            return found

        monkeypatch.setattr(Store, "read_cursor_and_owner", lose_message)
        running = asyncio.create_task(serving(scope("s1"), wire.said.get, wire.heard.put))
        assert await wire.texts(1) == ["not told"]
        wire.said.put_nowait({"type": "websocket.disconnect"})
        await running

    run(scene)


def test_consumer_reads_lost_messages_from_inbox(valkey):
    async def scene():
        async with page() as (wire, serving):
            await asyncio.to_thread(live_store().put_messages, [Post("s1", "m1", "agent", "not told")])
            serving.on_notification({"what": hub.LOST})
            assert await wire.texts(1) == ["not told"]

    run(scene)
