"""A receiver that accepts connections late gets no more messages in a window than its quota."""

import socket
import threading
import time
from datetime import timedelta
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import psutil
import pytest

from config.local.processes import wait_until
from scheduling.channels import http_client
from scheduling.channels.base import Quota, channel_kinds
from scheduling.channels.quota import HeldSlot
from scheduling.channels.webhook import Webhook
from scheduling.models import ChannelConfig
from tests.scheduling.core.conftest import fall_due
from tests.scheduling.core.test_admission import all_delivered, deliver_due_until
from tests.support.waiting import WAIT_LIMIT

pytestmark = pytest.mark.django_db(transaction=True)

LIMIT, WINDOW = 5, timedelta(seconds=2)


class Robot(Webhook):
    kind = "robot"
    quotas = (Quota(LIMIT, WINDOW),)


class LateReceiver(ThreadingHTTPServer):
    """Its queue of connections is full until `accept`: the kernel drops what clients send, and they repeat it."""

    request_queue_size = 0
    daemon_threads = True

    def __init__(self):
        self.arrivals = []
        self.serving = threading.Thread(target=self.serve_forever, daemon=True)
        receiver = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self):
                receiver.arrivals.append(time.monotonic())
                self.rfile.read(int(self.headers["Content-Length"]))
                self.send_response(204)
                self.end_headers()

            def log_message(self, *_): ...

        super().__init__(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server_port}/hook"
        self._fillers = [socket.socket() for _ in range(4)]
        for filler in self._fillers:
            filler.setblocking(False)
            filler.connect_ex(self.server_address)

    def connecting(self):
        own = [each.getsockname()[1] for each in self._fillers]
        found = psutil.Process().net_connections("tcp")
        return sum(
            each.status == psutil.CONN_SYN_SENT and each.raddr.port == self.server_port and each.laddr.port not in own
            for each in found
        )

    def accept(self):
        for filler in self._fillers:
            filler.close()
        self.serving.start()


@pytest.fixture
def late_receiver(_sending, settings, monkeypatch):
    """It accepts once all connect. A connection that ended before would be missing for ever: the receiver rests."""
    monkeypatch.setattr(http_client, "CONNECT_TIMEOUT", 20.0)  # as long as a channel's
    settings.CHANNELS = settings.CHANNELS | {"robot": "tests.scheduling.core.test_slow_connections.Robot"}
    channel_kinds.cache_clear()
    with LateReceiver() as receiver:
        yield receiver
        if receiver.serving.is_alive():  # else the test failed before, and `shutdown` waits for ever
            receiver.shutdown()


def test_slow_connections_do_not_bring_messages_of_two_windows_together(
    matrix, late_receiver, record_event, monkeypatch
):
    robot = ChannelConfig.objects.create(key="robot", kind="robot", idempotent=False, config={"url": late_receiver.url})
    matrix.node(channel=robot)
    for number in range(2 * LIMIT):
        record_event(user=f"user-{number}")
    fall_due()

    connected = []  # before the first byte; when a slow machine notes the arrival says less
    renew = HeldSlot.renew

    async def note(self):
        connected.append(time.monotonic())
        await renew(self)

    monkeypatch.setattr(HeldSlot, "renew", note)

    def accept_when_all_connect():
        assert wait_until(lambda: late_receiver.connecting() == LIMIT, WAIT_LIMIT)
        late_receiver.accept()

    accepting = threading.Thread(target=accept_when_all_connect)
    accepting.start()
    deliver_due_until(all_delivered)
    accepting.join()

    arrivals = late_receiver.arrivals
    spans = [later - earlier for earlier, later in zip(sorted(connected), sorted(arrivals)[LIMIT:], strict=False)]
    assert len(arrivals) == len(connected) == 2 * LIMIT, "one was lost or sent twice"
    assert min(spans) >= WINDOW.total_seconds(), "more arrived in a window than the quota allows"
