"""A draft from its beginning to what is live, and nothing written on the way."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import time_machine
import yaml
from django.contrib.auth.models import User
from django.db import OperationalError, connection
from django.utils.timezone import now

from scheduling.configuration import snapshot
from scheduling.configuration.file.apply import InvalidConfiguration
from scheduling.configuration.file.document import InvalidDocument
from scheduling.errors import Conflict
from scheduling.experiments.replay import history, runs
from scheduling.experiments.replay.results import replay_events
from scheduling.models import Event, HarassmentRule, Node, Replay, Touch, UndoableAct
from scheduling.operations.failed_tasks import Actor
from scheduling.operations.undo import undo_act
from tests.scheduling.core.conftest import pass_time
from tests.support.matrix import MatrixBuilder, RecordEvent
from tests.support.touch_logs import list_verdicts

pytestmark = pytest.mark.django_db

OPS = Actor("ops")


def edited(**changes: Any) -> str:
    """The live draft with its only node (and its cap) changed."""
    given = yaml.safe_load(runs.export_live_draft())
    cap = changes.pop("limit", None)
    given["nodes"][0].update(changes)
    if cap is not None:
        given["harassment_rules"][0]["limit"] = cap
    return yaml.safe_dump(given, allow_unicode=True)


@pytest.fixture
def two_customers_node(matrix: MatrixBuilder, record_event: RecordEvent) -> Node:
    """Five downloads of Ann's and one of Bob's, hours apart, two days ago."""
    node = matrix.node(delay=timedelta(minutes=15), guard_dedupe="ignore")
    for _ in range(5):
        record_event()
        pass_time(hours=1)
    record_event(user="bob")
    pass_time(days=2)
    return node


def replayed(text: str, days: int = 7) -> Replay:
    run = runs.create_replay(text, days, OPS)
    assert runs.execute_next_replay()
    run.refresh_from_db()
    return run


def test_replay_lower_cap_sends_less_with_reason(two_customers_node: Node) -> None:
    run = replayed(edited(limit=1))
    assert (run.state, run.done, run.total, run.problem) == ("done", 6, 6, "")
    live, after = run.result["live"], run.result["draft"]
    assert (live["totals"]["delivered"], live["suppressed"]) == (4, {"cap": 2})
    assert (after["totals"]["delivered"], after["suppressed"]) == (2, {"cap": 4})
    assert (live["customers_reached"], live["customers_at_cap"]) == (2, 1)
    assert run.changes == [
        {"section": "harassment_rules", "verb": "changed", "label": "cap (user)",
         "differences": [{"path": "limit", "before": 3, "after": 1}]}
    ]  # fmt: skip


def test_replay_of_a_holdout_or_a_part_gives_their_reasons(two_customers_node: Node) -> None:
    given = yaml.safe_load(runs.export_live_draft())
    given["holdout"] = {"percent": 100}
    assert replayed(yaml.safe_dump(given)).result["draft"]["suppressed"] == {"holdout": 6}
    given["holdout"] = {"percent": 0}
    given["harassment_rules"].append({"kind": "cap", "limit": 1, "window": "24h", "tag": "sale"})
    given["nodes"][0]["tags"] = ["sale"]
    assert replayed(yaml.safe_dump(given)).result["draft"]["suppressed"] == {"cap": 4}


def test_replay_writes_only_its_row(two_customers_node: Node) -> None:
    before = (list(Touch.objects.order_by("pk").values()), len(list_verdicts()), Node.objects.get().version)
    version = snapshot.current().version
    run = replayed(edited(delay="1h", key="renamed"))
    assert set(run.result["draft"]["nodes"]) == {"renamed"}
    assert (
        list(Touch.objects.order_by("pk").values()), len(list_verdicts()), Node.objects.get().version
    ) == before  # fmt: skip
    assert snapshot.current().version == version
    assert Node.history.count() == 1
    assert HarassmentRule.objects.get(kind="cap").limit == 3


def test_replay_template_with_missing_data_fails(two_customers_node: Node) -> None:
    text = runs.export_live_draft().replace("user.name", "event.data.order_no")
    assert replayed(text).result["draft"]["failed"] == {"template_data_missing": 6}


def test_replay_includes_waiting_touches(matrix: MatrixBuilder, record_event: RecordEvent) -> None:
    matrix.node(delay=timedelta(days=3))
    record_event()
    pass_time(days=2, hours=1)
    record_event(user="bob")
    pass_time(days=1)
    result = replayed(edited(enabled=False), days=2).result
    assert result["live"]["totals"] == {"planned": 2, "carried": 1, "delivered": 1, "waiting": 1}
    assert result["draft"]["suppressed"] == {"node_disabled": 1}


def test_replay_reports_truncated_waiting_touches(
    matrix: MatrixBuilder, record_event: RecordEvent, monkeypatch: pytest.MonkeyPatch
) -> None:
    matrix.node(delay=timedelta(days=3))
    for user in ("ann", "bob", "eve"):
        record_event(user=user)
    pass_time(days=1)
    until = now()
    for most, carried, incomplete in ((3, 3, False), (2, 2, True)):
        monkeypatch.setattr(history, "MOST_WAITING_AT_START", most)
        told = replay_events({"live": snapshot.current()}, history.choose_window(until, until))
        assert (told["live"]["totals"]["carried"], told["waiting_incomplete"]) == (carried, incomplete)


def test_replay_window_is_shortened_to_event_limit(two_customers_node: Node) -> None:
    whole = history.choose_window(now() - timedelta(days=7), now())
    assert (whole.events, whole.shortened) == (6, False)
    short = history.choose_window(now() - timedelta(days=7), now(), most=4)
    assert (short.events, short.shortened) == (4, True)
    assert sum(len(events) for some in history.iterate_batches(short) for _, events in some) == 4


def test_replay_draft_errors_name_the_field(two_customers_node: Node) -> None:
    with pytest.raises(InvalidConfiguration) as error:
        runs.create_replay(edited(delay="soon", template="none"), 7, OPS)
    assert {each.path for each in error.value.problems} == {"nodes[0].delay", "nodes[0].template"}
    with pytest.raises(InvalidConfiguration, match="channels: a draft cannot change this"):
        runs.create_replay("channels: []", 7, OPS)
    with pytest.raises(InvalidDocument, match="line 2"):
        runs.create_replay("nodes: {", 7, OPS)
    assert not Replay.objects.exists()


def test_publish_draft_stores_author_once(two_customers_node: Node) -> None:
    run = replayed(edited(delay="20m"))
    user = User.objects.create_user("ops")
    assert runs.publish_draft(run.pk, Actor("ops", user)) is None
    node = Node.objects.get()
    assert (node.delay, node.version) == (timedelta(minutes=20), 2)
    latest = node.history.latest()
    assert (latest.history_user, latest.history_change_reason) == (user, f"replay #{run.pk}")
    run.refresh_from_db()
    assert (run.state, run.settled_by) == ("published", "ops")
    with pytest.raises(Conflict):
        runs.publish_draft(run.pk, Actor("ops", user))


def test_undo_of_a_publication_ends_the_holdout_that_it_added(two_customers_node: Node) -> None:
    """The row did not exist before. The draft before had no section for it, so the hold-out stayed."""
    user = User.objects.create_superuser("ops")
    draft = yaml.safe_load(runs.export_live_draft()) | {"holdout": {"percent": 10}}
    run = replayed(yaml.safe_dump(draft, allow_unicode=True))
    runs.publish_draft(run.pk, Actor("ops", user))
    assert snapshot.current().nodes[two_customers_node.pk].global_holdout is not None

    undo_act(UndoableAct.objects.get().pk, Actor("ops", user))

    assert snapshot.current().nodes[two_customers_node.pk].global_holdout is None


def test_publish_draft_can_move_waiting_touches(matrix: MatrixBuilder, record_event: RecordEvent) -> None:
    matrix.node(delay=timedelta(days=1))
    (task_id,) = record_event().task_ids
    before = Touch.objects.get(pk=task_id)
    moved = runs.publish_draft(replayed(edited(delay="2d")).pk, OPS, move_waiting=True)
    assert moved is not None
    assert (moved.touches, moved.overdue) == (1, 0)
    assert Touch.objects.get(pk=task_id).due_at == before.due_at + timedelta(days=1)


def test_publish_draft_survives_a_failed_move(two_customers_node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*_: Any) -> None:
        raise OperationalError

    monkeypatch.setattr(runs.rescheduling, "move_after_plan", refused)
    moved = runs.publish_draft(replayed(edited(delay="20m")).pk, OPS, move_waiting=True)
    assert moved is not None
    assert moved.broken
    assert Node.objects.get().delay == timedelta(minutes=20)


def test_slow_replay_sends_heartbeats_before_events(
    matrix: MatrixBuilder, record_event: RecordEvent, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each chunk of people counts, and so does finding the window."""
    matrix.node(delay=timedelta(days=3))
    for user in ("ann", "bob"):
        record_event(user=user)
    pass_time(days=2)
    monkeypatch.setattr(history, "CHUNK", 1)
    told: list[int] = []
    window = history.choose_window(now() - timedelta(days=1), now())
    replay_events({"live": snapshot.current()}, window, told.append)
    assert told == [0] * len(told)
    assert len(told) >= 4  # what waits is read, Ann, Bob, the end

    found, run = history.choose_window, runs.create_replay(runs.export_live_draft(), 1, OPS)
    hour_ago = now() - timedelta(hours=1)

    def slowly(*given: Any) -> history.Window:
        Replay.objects.update(beat_at=hour_ago)
        return found(*given)

    def look(*_: Any, **__: Any) -> dict[str, Any]:
        run.refresh_from_db()
        return {}

    monkeypatch.setattr(history, "choose_window", slowly)
    monkeypatch.setattr(runs, "replay_events", look)
    assert runs.execute_next_replay()
    assert run.beat_at is not None
    assert run.beat_at > hour_ago


def test_publish_draft_refuses_after_other_edit(two_customers_node: Node) -> None:
    run = replayed(edited(delay="20m"))
    two_customers_node.priority = 0
    two_customers_node.save()
    with pytest.raises(Conflict, match="after the replay"):
        runs.publish_draft(run.pk, OPS)
    run.refresh_from_db()
    assert (run.state, Node.objects.get().delay) == ("done", timedelta(minutes=15))


def test_discarded_replay_stops(two_customers_node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    run = runs.create_replay(edited(delay="20m"), 7, OPS)

    def discard_during_run(*_: Any, progress: Callable[[int], None]) -> Any:
        runs.discard_replay(run.pk, OPS)
        progress(3)
        raise AssertionError("it went on")

    monkeypatch.setattr(runs, "replay_events", discard_during_run)
    assert runs.execute_next_replay()
    run.refresh_from_db()
    assert (run.state, run.result, run.done) == ("discarded", None, 0)


def test_replay_pages_work_without_a_cursor(two_customers_node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    """As behind a pooler. Later events are not in memory yet while the first are replayed."""
    monkeypatch.setattr(history, "CHUNK", 2)
    monkeypatch.setitem(connection.settings_dict, "DISABLE_SERVER_SIDE_CURSORS", True)
    pages = history.iterate_batches(history.choose_window(now() - timedelta(days=7), now()))
    seen = [event.id for _, events in next(pages) for event in events]
    *_, before_last, last = Event.objects.order_by("received_at").values_list("pk", flat=True)
    Event.objects.filter(pk=last).update(data={"read": "late"})
    Touch.objects.filter(event=before_last).delete()
    Event.objects.filter(pk=before_last).delete()
    rest = [event for page in pages for _, events in page for event in events]
    assert [len(seen), len(rest)] == [2, 3]
    assert (rest[-1].id, rest[-1].data) == (last, {"read": "late"})


def test_one_replay_runs_and_lost_one_is_repeated(two_customers_node: Node) -> None:
    run = runs.create_replay(edited(delay="20m"), 7, OPS)
    other = runs.create_replay(edited(delay="30m"), 7, OPS)
    Replay.objects.filter(pk=run.pk).update(state="running", tries=1, beat_at=now())
    assert not runs.execute_next_replay()
    Replay.objects.filter(pk=run.pk).update(beat_at=now() - runs.HEARTBEAT_TIMEOUT)
    assert runs.execute_next_replay()
    run.refresh_from_db()
    other.refresh_from_db()
    assert (run.state, run.tries, other.state) == ("done", 2, "waiting")


def test_replay_liveness_uses_database_time(two_customers_node: Node) -> None:
    run = runs.create_replay(edited(delay="20m"), 7, OPS)
    Replay.objects.filter(pk=run.pk).update(state="running", tries=1, beat_at=now())
    with time_machine.travel(now() + timedelta(minutes=10), tick=True):
        assert not runs.execute_next_replay()
    run.refresh_from_db()
    assert (run.state, run.tries) == ("running", 1)


def test_replay_fails_after_three_lost_workers(two_customers_node: Node) -> None:
    run = runs.create_replay(edited(delay="20m"), 7, OPS)
    Replay.objects.filter(pk=run.pk).update(state="running", tries=runs.TRIES, beat_at=now() - runs.HEARTBEAT_TIMEOUT)
    assert not runs.execute_next_replay()
    run.refresh_from_db()
    assert (run.state, run.problem) == ("failed", "the worker of this replay was lost three times")


def test_replay_of_outdated_draft_fails_with_reason(two_customers_node: Node, matrix: MatrixBuilder) -> None:
    run = runs.create_replay(edited(channel="log"), 7, OPS)
    matrix.channel.retired_at = now()
    matrix.channel.save()
    assert runs.execute_next_replay()
    run.refresh_from_db()
    assert (run.state, run.problem) == ("failed", "nodes[0].channel: there is no channel “log”")
