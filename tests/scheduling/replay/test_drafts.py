"""A draft from its beginning to what is live, and nothing written on the way."""

from datetime import timedelta

import pytest
import time_machine
import yaml
from django.contrib.auth.models import User
from django.db import OperationalError, connection
from django.db.models import F
from django.test import override_settings
from django.utils.timezone import now

from scheduling.configuration import snapshot
from scheduling.configuration.file.apply import InvalidConfiguration, plan_changes
from scheduling.configuration.file.sections import sections
from scheduling.error_text import ErrorText
from scheduling.errors import Conflict
from scheduling.experiments import drafts, replay
from scheduling.models import ConfigDraft, Event, HarassmentRule, Node, Touch
from scheduling.operations.failed_tasks import Actor
from scheduling.strict_text import InvalidText
from sessions.models import SilencePolicy
from tests.scheduling.core.conftest import pass_time
from tests.support.drafts import open_draft, replay_draft

pytestmark = pytest.mark.django_db


def edited(**changes):
    """The live draft with its only node (and its cap) changed."""
    given = yaml.safe_load(drafts.export_live_draft())
    cap = changes.pop("limit", None)
    given["nodes"][0].update(changes)
    if cap is not None:
        given["harassment_rules"][0]["limit"] = cap
    return yaml.safe_dump(given, allow_unicode=True)


@pytest.fixture
def ops(db):
    return User.objects.create_superuser("ops")


@pytest.fixture
def two_customers_node(matrix, record_event):
    """Five downloads of Ann's and one of Bob's, hours apart, two days ago."""
    node = matrix.node(delay=timedelta(minutes=15), guard_dedupe="ignore")
    for _ in range(5):
        record_event()
        pass_time(hours=1)
    record_event(user="bob")
    pass_time(days=2)
    return node


def replayed(user, text):
    """The result of this draft."""
    draft = replay_draft(open_draft(user, text))
    assert (draft.state, draft.problems) == ("done", [])
    return draft.result


def publish(draft, actor, **more):
    return drafts.publish_draft(draft.pk, drafts.compute_seen(draft), actor, **more)


def test_replay_shows_what_the_draft_would_have_done_with_reasons(two_customers_node, ops):
    result = replayed(ops, edited(limit=1))
    assert (result["events"], result["shortened"]) == (6, False)
    assert result["live"] == {"guide": {"planned": 6, "delivered": 4, "suppressed:cap": 2}}
    assert result["draft"] == {"guide": {"planned": 6, "delivered": 2, "suppressed:cap": 4}}

    given = yaml.safe_load(drafts.export_live_draft())
    given["holdout"] = {"percent": 100}
    assert replayed(ops, yaml.safe_dump(given))["draft"]["guide"]["suppressed:holdout"] == 6
    given["holdout"] = {"percent": 0}
    given["harassment_rules"].append({"kind": "cap", "limit": 1, "window": "24h", "tag": "sale"})
    given["nodes"][0]["tags"] = ["sale"]
    assert replayed(ops, yaml.safe_dump(given))["draft"]["guide"]["suppressed:cap"] == 4

    text = drafts.export_live_draft().replace("user.name", "event.data.order_no")
    assert replayed(ops, text)["draft"]["guide"]["failed:template_data_missing"] == 6


def test_replay_writes_only_its_row(two_customers_node, ops):
    def read_all():
        rules = HarassmentRule.objects.order_by("pk").values_list("limit", flat=True)
        touches = Touch.objects.order_by("pk").values()
        return list(touches), list(rules), Node.history.count(), snapshot.current().version

    before = read_all()
    assert set(replayed(ops, edited(delay="1h", key="renamed", limit=1))["draft"]) == {"renamed"}
    assert read_all() == before


def test_replay_window_is_shortened_to_event_limit(two_customers_node):
    whole = replay.choose_window(now() - timedelta(days=7), now())
    assert (len(whole.arrivals), whole.shortened) == (6, False)
    short = replay.choose_window(now() - timedelta(days=7), now(), most=4)
    assert (len(short.arrivals), short.shortened) == (4, True)
    assert sum(len(events) for some in replay.iterate_batches(short) for _, events in some) == 4


def test_replay_pages_work_without_a_cursor(two_customers_node, monkeypatch):
    """As behind a pooler. Later events are not in memory yet while the first are replayed."""
    monkeypatch.setattr(replay, "CHUNK", 2)
    monkeypatch.setitem(connection.settings_dict, "DISABLE_SERVER_SIDE_CURSORS", True)
    pages = replay.iterate_batches(replay.choose_window(now() - timedelta(days=7), now()))
    seen = [event.id for _, events in next(pages) for event in events]
    *_, before_last, last = Event.objects.order_by("received_at").values_list("pk", flat=True)
    Event.objects.filter(pk=last).update(data={"read": "late"})
    Touch.objects.filter(event=before_last).delete()
    Event.objects.filter(pk=before_last).delete()
    rest = [event for page in pages for _, events in page for event in events]
    assert [len(seen), len(rest)] == [2, 3]
    assert (rest[-1].id, rest[-1].data) == (last, {"read": "late"})


def test_draft_errors_name_the_field(two_customers_node, ops):
    draft = open_draft(ops, edited(delay="soon", template="none"))
    with pytest.raises(InvalidConfiguration) as refused:
        drafts.plan_edits(draft)
    assert {each.field for each in refused.value.errors} == {"nodes[0].delay", "nodes[0].template"}
    with pytest.raises(InvalidConfiguration):
        drafts.request_replay(ops, drafts.compute_seen(draft))
    with pytest.raises(InvalidConfiguration, match="channels: a draft cannot change this"):
        drafts.read_draft("channels: []")
    with pytest.raises(InvalidText, match="line 2"):
        drafts.read_draft("nodes: {")
    assert not drafts.run_next_replay()


def test_draft_leaves_out_sections_of_apps_that_are_not_installed(two_customers_node):
    try:
        with override_settings(CONFIG_SECTIONS=[]):
            sections.cache_clear()
            given = drafts.read_draft(drafts.export_live_draft())
            changes = plan_changes(given).changes
            draftable = [drafts.is_draftable(model) for model in (Node, SilencePolicy)]
    finally:
        sections.cache_clear()
    assert ("nodes" in given, "silence_policies" in given, changes) == (True, False, [])
    assert draftable == [True, False]


def test_publication_stores_author_and_reason_once(two_customers_node, ops):
    draft = open_draft(ops, edited(delay="20m"))
    with pytest.raises(Conflict, match="not been replayed"):
        publish(draft, Actor("ops", ops, "quieter"))
    replay_draft(draft)
    assert publish(draft, Actor("ops", ops, "quieter")) is None
    node = Node.objects.get()
    assert (node.delay, node.version) == (timedelta(minutes=20), 2)
    latest = node.history.latest()
    assert (latest.history_user, latest.history_change_reason) == (ops, "quieter")
    assert not ConfigDraft.objects.exists()
    with pytest.raises(Conflict):
        publish(draft, Actor("ops", ops, "quieter"))


def test_publication_can_move_waiting_touches(matrix, record_event, ops):
    matrix.node(delay=timedelta(days=1))
    (task_id,) = record_event().task_ids
    before = Touch.objects.get(pk=task_id)
    moved = publish(replay_draft(open_draft(ops, edited(delay="2d"))), Actor("ops", ops, "r"), move_waiting=True)
    assert (moved.touches, moved.overdue) == (1, 0)
    assert Touch.objects.get(pk=task_id).due_at == before.due_at + timedelta(days=1)


def test_publication_survives_a_failed_move(two_customers_node, ops, monkeypatch):
    def refused(*_):
        raise OperationalError

    monkeypatch.setattr(drafts.rescheduling, "move_after_plan", refused)
    draft = replay_draft(open_draft(ops, edited(delay="20m")))
    assert publish(draft, Actor("ops", ops, "r"), move_waiting=True).broken
    assert Node.objects.get().delay == timedelta(minutes=20)


# Each row: the draft's edit of its node, the live edit after the draft was started, and whether they conflict.
LIVE_EDITS = [
    ("another section", {"delay": "20m"}, lambda: HarassmentRule.objects.filter(kind="cap").update(limit=9), False),
    ("the same row", {"delay": "20m"}, lambda: Node.objects.update(priority=0), True),
    ("the same value", {"delay": "20m"}, lambda: Node.objects.update(delay=timedelta(minutes=20)), False),
    ("the row is retired", {"delay": "20m"}, lambda: Node.objects.update(retired_at=now()), True),
    ("a rule of its kind", {"limit": 1}, lambda: HarassmentRule.objects.filter(kind="cap").update(limit=9), True),
    ("a new rule of its kind", {"limit": 1},
     lambda: HarassmentRule.objects.create(kind="cap", limit=9, window=timedelta(days=7)), False),
]  # fmt: skip


def test_live_edits_are_kept_or_refuse_the_publication(two_customers_node, ops):
    failures = []
    for name, edit, edit_live, conflicts in LIVE_EDITS:
        HarassmentRule.objects.filter(kind="cap").exclude(limit=3).delete()
        draft = replay_draft(open_draft(ops, edited(**edit)))
        edit_live()
        live = yaml.safe_load(drafts.export_live_draft())
        try:
            publish(draft, Actor("ops", ops, "r"))
            refused = False
        except Conflict:
            refused = True
        expected = dict(live)
        if not refused:
            for key, value in edit.items():
                target = expected["nodes" if key == "delay" else "harassment_rules"][0]
                target[key] = value
        if (refused, yaml.safe_load(drafts.export_live_draft())) != (conflicts, expected):
            failures.append(name)
        ConfigDraft.objects.all().delete()
        Node.objects.update(priority=1, delay=timedelta(minutes=15), retired_at=None, version=F("version") + 1)
        HarassmentRule.objects.filter(kind="cap").update(limit=3)
        HarassmentRule.objects.filter(kind="cap", window=timedelta(days=7)).delete()
    assert failures == []


def test_new_draft_is_refused_if_the_live_configuration_changed_on_the_way(two_customers_node, ops):
    seen, text = drafts.compute_seen(None), edited(delay="20m")
    Node.objects.update(priority=0)
    with pytest.raises(Conflict):
        drafts.replace_text(ops, text, seen)
    assert not ConfigDraft.objects.exists()


def test_result_of_a_replaced_draft_is_dropped(two_customers_node, ops, monkeypatch):
    draft = open_draft(ops, edited(delay="20m"))
    drafts.request_replay(ops, drafts.compute_seen(draft))

    def edit_meanwhile(*_):
        drafts.replace_text(ops, edited(delay="30m"), drafts.compute_seen(draft))
        return {}

    monkeypatch.setattr(drafts, "replay_events", edit_meanwhile)
    assert drafts.run_next_replay()
    draft.refresh_from_db()
    assert (draft.state, draft.result, "30m" in draft.document) == ("open", None, True)


def test_one_replay_runs_and_a_lost_one_fails(two_customers_node, ops):
    first, second = (open_draft(user, edited(delay="20m")) for user in (ops, User.objects.create_user("eve")))
    for draft in (first, second):
        drafts.request_replay(draft.owner, drafts.compute_seen(draft))
    ConfigDraft.objects.filter(pk=first.pk).update(state="running")
    with time_machine.travel(now() + drafts.MOST_TIME, tick=True):  # the clock of a node does not count
        assert not drafts.run_next_replay()
    ConfigDraft.objects.filter(pk=first.pk).update(state_at=now() - drafts.MOST_TIME)
    assert drafts.run_next_replay()
    first.refresh_from_db()
    second.refresh_from_db()
    assert (first.state, second.state) == ("failed", "done")
    assert first.problems == [ErrorText.dump(drafts.LOST)]
    assert replay_draft(first).state == "done"


def test_replay_of_outdated_draft_fails_with_reason(two_customers_node, matrix, ops):
    draft = open_draft(ops, edited(delay="20m"))
    drafts.request_replay(ops, drafts.compute_seen(draft))
    matrix.channel.retired_at = now()
    matrix.channel.save()
    assert drafts.run_next_replay()
    draft.refresh_from_db()
    assert draft.state == "failed"
    assert [*map(ErrorText.load, draft.problems)] == ["nodes[0].channel: there is no channel “log”"]


def test_edit_of_a_rule_survives_the_retirement_of_an_earlier_one(two_customers_node, ops):
    """The rule that stayed moved into the row of the retired one, and its edit was lost with its own row."""
    HarassmentRule.objects.all().delete()
    first = HarassmentRule.objects.create(kind="cap", limit=1, window=timedelta(days=1))
    second = HarassmentRule.objects.create(kind="cap", limit=2, window=timedelta(days=2))

    def save(row, **values):
        row = HarassmentRule.objects.get(pk=row.pk)
        for name, value in values.items():
            setattr(row, name, value)
        row.save()
        return True

    assert drafts.capture_edit(ops, lambda: save(first, retired_at=now()))
    assert drafts.capture_edit(ops, lambda: save(second, limit=7))
    given = yaml.safe_load(ConfigDraft.objects.get(owner=ops).document)
    assert [rule["limit"] for rule in given["harassment_rules"]] == [7]


def test_edit_of_a_row_that_the_draft_retires_is_refused(two_customers_node, ops):
    """Of two rules with equal kind, scope and window the draft retires the later row: its text has one of them."""
    HarassmentRule.objects.all().delete()
    first, second = (HarassmentRule.objects.create(kind="cap", limit=n, window=timedelta(days=1)) for n in (1, 2))

    def save(row, **values):
        HarassmentRule.objects.filter(pk=row.pk).update(**values)
        return True

    assert drafts.capture_edit(ops, lambda: save(first, retired_at=now()))
    text = ConfigDraft.objects.get(owner=ops).document
    with pytest.raises(Conflict, match="another change of the draft"):
        drafts.capture_edit(ops, lambda: save(second, limit=7))
    assert ConfigDraft.objects.get(owner=ops).document == text
