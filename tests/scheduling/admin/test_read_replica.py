"""Heavy reads of the back office use a real streaming replica, and the primary whenever it is not good enough."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import pytest
from django.contrib.auth.models import User
from django.db import connection, connections, transaction
from django.test import Client
from django.urls import reverse
from pytest_django import Settings

from scheduling import replica, sql
from scheduling.experiments import drafts
from scheduling.models import Customer
from tests.support.drafts import open_draft
from tests.support.matrix import MatrixBuilder, RecordEvent
from tests.support.streaming_replica import Standby, streaming_replica

pytestmark = pytest.mark.django_db(transaction=True)

CUSTOMERS = "admin:scheduling_customer_changelist"


@pytest.fixture
def standby(transactional_db: None, monkeypatch: pytest.MonkeyPatch) -> Iterator[Standby]:
    with streaming_replica(monkeypatch) as standby:
        yield standby


def asked(get: Callable[[], Any]) -> tuple[Any, list[str]]:
    """The answer, and what the replica was asked for it, without the look at its state."""
    database = connections[replica.ALIAS]
    database.force_debug_cursor = True
    database.queries_log.clear()
    answer = get()
    return answer, [each["sql"] for each in database.queries_log if "scheduling_" in (each["sql"] or "")]


def page(client: Client, name: str, **values: str) -> tuple[str, list[str]]:
    def get() -> str:
        answer = client.get(reverse(name, args=["csv"] if name.endswith("_export") else None), values)
        assert answer.status_code == 200
        content = b"".join(answer.streaming_content) if answer.streaming else answer.content
        return content.decode()

    return asked(get)


def test_heavy_read_uses_replica_and_writes_nothing_there(
    standby: Standby, as_member: Callable[[str], Client], matrix: MatrixBuilder, record_event: RecordEvent
) -> None:
    client = as_member("admin")
    matrix.node(goal_event="order.paid", goal_within=timedelta(days=7))
    record_event()
    standby.await_all()
    for name, values in [
        ("admin:index", {}),
        ("admin:scheduling_touch_changelist", {}),
        ("admin:scheduling_touch_changelist", {"q": "ann"}),
        ("admin:scheduling_event_changelist", {}),
        (CUSTOMERS, {"q": "ann"}),
        ("admin:scheduling_complaint_rates", {}),
        ("admin:scheduling_node_conversion", {}),
        ("admin:scheduling_touch_export", {}),
    ]:
        text, statements = page(client, name, **values)
        assert statements, name
        assert not [each for each in statements if not each.lstrip().startswith(("SELECT", "WITH"))], name
        assert "ann" in text or "order.paid" in text or name in ("admin:index", "admin:scheduling_complaint_rates")
    url = reverse("admin:scheduling_customer_change", args=[Customer.objects.get().pk])
    answer, statements = asked(lambda: client.get(url))
    assert (answer.status_code, statements) == (200, []), "a page of one row reads the primary"


def test_list_after_own_change_shows_it_and_others_see_it_later(
    standby: Standby,
    editor: Client,
    fill_form: Callable[..., dict[str, Any]],
    record_event: RecordEvent,
    as_member: Callable[[str], Client],
) -> None:
    record_event()
    customer = Customer.objects.get()
    viewer = as_member("viewer")
    standby.await_all()
    standby.pause()
    url = reverse("admin:scheduling_customer_change", args=[customer.pk])
    assert editor.post(url, fill_form(url, name="Ann Renamed")).status_code == 302
    mine, from_replica = page(editor, CUSTOMERS)
    assert "Ann Renamed" in mine
    assert from_replica == []
    others, from_replica = page(viewer, CUSTOMERS)
    assert "Ann Renamed" not in others
    assert from_replica
    standby.resume()
    standby.await_all()
    assert page(editor, CUSTOMERS)[1]


def test_list_of_lagging_replica_shows_age_then_uses_primary(
    standby: Standby,
    as_member: Callable[[str], Client],
    record_event: RecordEvent,
    settings: Settings,
    monkeypatch: pytest.MonkeyPatch,
    read_log: Callable[[], str],
) -> None:
    viewer = as_member("viewer")
    standby.await_all()
    assert "lags" not in page(viewer, CUSTOMERS)[0]
    standby.pause()
    with connection.cursor() as cursor:
        cursor.execute("SET synchronous_commit = on")  # off in tests: the write would not count yet
    record_event(user="latecomer")
    monkeypatch.setattr(replica, "SHOWN_AGE", 0.0)
    text, _ = page(viewer, CUSTOMERS)
    assert "latecomer" not in text
    assert "The read replica of the database lags" in text
    settings.AFTERTOUCH_REPLICA_LAG_LIMIT = timedelta(0)
    text, from_replica = page(viewer, CUSTOMERS)
    assert "latecomer" in text
    assert "lags" not in text
    assert from_replica == []
    assert '"problem": "lagging"' in read_log()
    standby.resume()
    standby.await_all()
    text, from_replica = page(viewer, CUSTOMERS)
    assert "latecomer" in text
    assert from_replica
    assert "replica_used_again" in read_log()


def test_list_of_stopped_or_promoted_replica_uses_primary_and_rests(
    standby: Standby,
    as_member: Callable[[str], Client],
    record_event: RecordEvent,
    monkeypatch: pytest.MonkeyPatch,
    read_log: Callable[[], str],
) -> None:
    record_event()
    viewer = as_member("viewer")
    standby.await_all()
    monkeypatch.setattr(replica, "PROBE_EVERY", 600.0)
    monkeypatch.setattr(replica, "REST", 600.0)
    assert page(viewer, CUSTOMERS)[1]
    standby.stop()
    text, _ = page(viewer, CUSTOMERS)  # it was good at the last look: the list is built a second time
    assert "ann" in text
    assert '"problem": "failed"' in read_log()
    connections[replica.ALIAS].settings_dict["HOST"] = "not asked"
    assert "ann" in page(viewer, CUSTOMERS)[0]
    monkeypatch.setattr(replica, "REST", 0.0)
    monkeypatch.setattr(replica.replica_watch, "resting_until", 0.0)
    monkeypatch.setattr(replica, "PROBE_EVERY", 0.0)
    assert "ann" in page(viewer, CUSTOMERS)[0]
    assert '"problem": "unreachable"' in read_log()
    standby.start()
    connections[replica.ALIAS].settings_dict.update(HOST="127.0.0.1", PORT=str(standby.port))
    standby.await_all()
    assert page(viewer, CUSTOMERS)[1]
    standby.promote()
    record_event(user="latecomer")
    text, from_replica = page(viewer, CUSTOMERS)
    assert "latecomer" in text
    assert from_replica == []
    assert '"problem": "promoted"' in read_log()


def test_replay_reads_replica_once_it_holds_the_window(
    standby: Standby, matrix: MatrixBuilder, record_event: RecordEvent, monkeypatch: pytest.MonkeyPatch
) -> None:
    matrix.node()
    record_event()
    standby.pause()
    record_event(user="bob")
    owner = User.objects.create_user("ops")
    draft = open_draft(owner, drafts.export_live_draft().replace("limit: 3", "limit: 4"))
    monkeypatch.setattr(drafts, "REPLICA_WAIT", 0.3)
    for pausing in (True, False):
        if not pausing:
            standby.resume()
            monkeypatch.setattr(drafts, "REPLICA_WAIT", 60.0)
        drafts.request_replay(draft.owner, drafts.compute_seen(draft))
        _, statements = asked(drafts.run_next_replay)
        draft.refresh_from_db()
        assert draft.state == "done", draft.problem
        assert draft.result["events"] == 2
        assert bool(statements) is not pausing


def test_read_within_transaction_stays_on_primary(standby: Standby, record_event: RecordEvent) -> None:
    standby.await_all()
    standby.pause()

    def read_twice(age: float) -> tuple[int, int]:
        with transaction.atomic():
            record_event()
            inside = sql.rows("SELECT count(*) FROM scheduling_event", {})[0][0]
        return inside, sql.rows("SELECT count(*) FROM scheduling_event", {})[0][0]

    assert replica.read_from_replica(read_twice) == (1, 0)
    assert not connection.in_atomic_block
