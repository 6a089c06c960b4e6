"""Mails over relays that take their time: no time of a mail runs while it waits for a thread."""

import asyncio
import threading

import pytest

from config.local.processes import wait_until
from scheduling.channels.email import AT_ONCE, Email, mail_threads
from scheduling.delivery import pipeline
from scheduling.delivery.sender import sender
from scheduling.models import ChannelConfig, Customer, Touch
from tests.scheduling.channels.relays import RelayServer
from tests.scheduling.core.conftest import fall_due, rows
from tests.support.waiting import WAIT_LIMIT

pytestmark = pytest.mark.django_db(transaction=True)
A_FEW = 4  #: at once: they are all with the relay long before the time of the first one is up


class SlowRelay:
    """Takes a mail and keeps its answer to itself until it is let go."""

    def __init__(self):
        self.holds = self.most = 0
        self.release_calls = asyncio.Event()
        self.server = RelayServer({"END": self._hold})

    async def _hold(self, talk):
        self.holds += 1
        self.most = max(self.most, self.holds)
        await self.release_calls.wait()
        self.holds -= 1
        return "250 2.0.0 queued"


@pytest.fixture
def loop():
    """Relays answer in a thread of their own."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    yield loop
    loop.call_soon_threadsafe(loop.stop)
    thread.join(WAIT_LIMIT)
    loop.close()


@pytest.fixture
def slow(_sending, loop, monkeypatch):
    monkeypatch.setattr(Email, "at_once", A_FEW)
    relay = SlowRelay()
    asyncio.run_coroutine_threadsafe(relay.server.__aenter__(), loop).result(WAIT_LIMIT)
    yield relay
    loop.call_soon_threadsafe(relay.release_calls.set)
    assert sender().drain(WAIT_LIMIT)
    asyncio.run_coroutine_threadsafe(relay.server.__aexit__(None, None, None), loop).result(WAIT_LIMIT)


@pytest.fixture
def quick(_sending, loop):
    relay = RelayServer()
    asyncio.run_coroutine_threadsafe(relay.__aenter__(), loop).result(WAIT_LIMIT)
    yield relay
    asyncio.run_coroutine_threadsafe(relay.__aexit__(None, None, None), loop).result(WAIT_LIMIT)


@pytest.fixture
def mails(matrix, record_event):
    """Deliver so many over this relay; returns their ids."""

    def mails(relay, count):
        key = f"mail-{relay.port}"
        channel = ChannelConfig.objects.create(key=key, kind="email", config={"url": relay.url})
        matrix.node(key, trigger=key, channel=channel)
        users = [f"{key}-{number}" for number in range(count)]
        ids = [record_event(key, user).task_ids[0] for user in users]
        for user in users:
            Customer.objects.filter(user_id=user).update(addresses={"email": f"{user}@example.org"})
        fall_due(*ids)
        pipeline.deliver_touches(ids)
        return ids

    return mails


def test_mail_is_marked_when_a_thread_is_free(mails, slow, loop):
    """All were marked and their time ran while 32 threads sent them one by one.

    Each thread picked the one with the least time left and gave it up, often after the relay had it. The outcome was
    unknown.
    """
    ids = mails(slow.server, 3 * A_FEW)

    assert wait_until(lambda: slow.holds == A_FEW, WAIT_LIMIT)
    assert Touch.objects.filter(state="running", sending_at__isnull=False).count() == A_FEW
    loop.call_soon_threadsafe(slow.release_calls.set)

    assert sender().drain(WAIT_LIMIT)
    assert {(row.state, row.reason) for row in rows(ids)} == {("delivered", "")}
    assert slow.most == A_FEW


def test_slow_relay_does_not_block_another(mails, slow, quick):
    held = mails(slow.server, A_FEW)
    assert wait_until(lambda: slow.holds == A_FEW, WAIT_LIMIT)

    (mail,) = mails(quick, 1)

    assert wait_until(lambda: Touch.objects.get(pk=mail).state == "delivered", WAIT_LIMIT)
    assert {row.state for row in rows(held)} == {"running"}, "it was delivered when the slow ones had been given up"
    assert mail_threads()._max_workers > AT_ONCE, "one slow relay may hold them all"
