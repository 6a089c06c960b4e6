"""The receiver of the reference page runs as printed, and accepts signed messages only."""

import os
import socket
import sqlite3
import subprocess
import sys
import threading
from contextlib import closing

import pytest

from config.environment import ROOT
from config.local.processes import select_port
from scheduling.models import WebhookMessage
from tests.docs.pages import blocks
from tests.scheduling.webhooks.conftest import SECOND_SECRET, SECRET, note_changes, send_all

PAGE = (ROOT / "docs" / "reference" / "webhooks.md").read_text("utf-8")


def is_listening(port):
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


@pytest.fixture
def example(tmp_path):
    port = select_port()
    (tmp_path / "receiver.py").write_text("".join(blocks(PAGE, "python")), "utf-8")
    env = os.environ | {"PORT": str(port), "WEBHOOK_SECRET": SECRET}
    with subprocess.Popen([sys.executable, "receiver.py"], cwd=tmp_path, env=env) as process:
        while not is_listening(port) and process.poll() is None:
            threading.Event().wait(0.05)
        yield f"http://127.0.0.1:{port}/"
        process.kill()


def test_printed_receiver_stores_signed_messages_and_refuses_others(subscribe, example, tmp_path):
    known = subscribe("known", config={"url": example, "secret": f"{SECOND_SECRET} {SECRET}"})
    other = subscribe("other", config={"url": example, "secret": SECOND_SECRET})
    note_changes(3)
    send_all()
    with closing(sqlite3.connect(tmp_path / "messages.db")) as database:
        stored = {row[0] for row in database.execute("SELECT id FROM message")}
    assert stored == {str(row.message_id) for row in known.messages.filter(state="delivered")}
    assert len(stored) == 3
    assert set(WebhookMessage.objects.filter(subscription=other).values_list("status", flat=True)) == {401, None}
