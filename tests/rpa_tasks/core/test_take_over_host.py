"""The thread that looks for the take-overs of its node. The database is real, their browsers are replaced."""

import threading

import pytest
from django.contrib.auth.models import User
from django.db import ProgrammingError, close_old_connections

from config.local.processes import wait_until
from rpa_tasks.models import TakeOver, TakeOverEnd
from rpa_tasks.takeover import host, leases
from rpa_tasks.takeover.host import TakeOverHost
from tests.support.waiting import WAIT_LIMIT

pytestmark = pytest.mark.django_db(transaction=True)


@pytest.fixture
def row(market, settings, tmp_path, monkeypatch):
    """An open take-over of this node, which ends as soon as it is hosted."""
    settings.AFTERTOUCH_NODE, settings.AFTERTOUCH_STATE_DIR = "n1", tmp_path
    for name in ("POLL_INTERVAL", "RETRY_AFTER"):
        monkeypatch.setattr(host, name, 0.01)
    monkeypatch.setattr(host, "host_take_over", lambda row, _: leases.end_take_over(row, TakeOverEnd.ENDED))
    market.node("n1")
    return leases.start_take_over(market.shop().pk, user=User.objects.create_user("ann"), address="203.0.113.7")


def has_ended(row):
    return TakeOver.objects.filter(pk=row.pk, end=TakeOverEnd.ENDED).exists()


def test_take_overs_are_hosted_after_an_unexpected_error(row, monkeypatch):
    """For example during a migration."""
    looks = []

    def fail_once():
        looks.append(len(looks))
        if len(looks) == 1:
            raise ProgrammingError("column does not exist")
        close_old_connections()

    monkeypatch.setattr(host, "close_old_connections", fail_once)
    hosting = TakeOverHost()
    hosting.start()
    try:
        assert wait_until(lambda: has_ended(row) or not hosting._thread.is_alive(), WAIT_LIMIT)
        assert has_ended(row)
    finally:
        hosting.stop()


def test_take_over_whose_thread_cannot_start_is_tried_again(row, monkeypatch):
    tries = []
    start = threading.Thread.start

    def fail(thread):
        if thread.name.startswith("take-over-"):
            tries.append(thread.name)
            if len(tries) < 3:
                raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", fail)
    hosting = TakeOverHost()
    hosting.start()
    try:
        assert wait_until(lambda: has_ended(row) or not hosting._thread.is_alive(), WAIT_LIMIT)
        assert has_ended(row)
    finally:
        hosting.stop()
