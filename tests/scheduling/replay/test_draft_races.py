"""Two users, or two pages of one user, act on a draft at the same moment."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from functools import partial

import pytest
import yaml
from django.contrib.auth.models import User

from scheduling.errors import Conflict
from scheduling.experiments.replay import open_drafts, runs
from scheduling.models import AuditEntry, ConfigDraft, HarassmentRule, Node, Replay
from scheduling.operations.failed_tasks import Actor
from tests.support.matrix import MatrixBuilder
from tests.support.second_connection import Race, SecondConnection, act_behind_locks

pytestmark = pytest.mark.django_db(transaction=True)


@pytest.fixture
def node(transactional_db: None, matrix: MatrixBuilder) -> Node:
    return matrix.node(delay=timedelta(minutes=15))


@pytest.fixture
def user(node: Node) -> User:
    return User.objects.create_user("ops")


def save_node(**values: object) -> Callable[[], bool]:
    def save() -> bool:
        node = Node.objects.get()
        for name, value in values.items():
            setattr(node, name, value)
        node.save()
        return True

    return save


def replay_draft(user: User) -> Replay:
    draft = ConfigDraft.objects.get(owner=user)
    run = open_drafts.replay_open_draft(user, 1, open_drafts.compute_seen(draft), Actor("ops", user))
    assert runs.execute_next_replay()
    return run


def test_two_publications_of_a_draft_publish_it_once(user: User, race: Race) -> None:
    assert open_drafts.capture_edit(user, save_node(delay=timedelta(minutes=20)))
    run = replay_draft(user)

    def publish(number: int) -> str:
        try:
            runs.publish_draft(run.pk, Actor(f"ops{number}", None, f"reason {number}"))
        except Conflict:
            return "refused"
        return f"reason {number} (replay #{run.pk})"

    outcomes = race(2, publish)
    (published,) = set(outcomes) - {"refused"}
    assert sorted(outcomes) == sorted([published, "refused"])
    latest = Node.objects.get().history.latest()
    assert (Node.history.count(), latest.history_change_reason) == (2, published)
    assert AuditEntry.objects.filter(action="published").count() == 2  # the replay and the configuration


def test_edit_while_its_draft_is_published_opens_a_new_draft(user: User) -> None:
    assert open_drafts.capture_edit(user, save_node(delay=timedelta(minutes=20)))
    run = replay_draft(user)

    def edit() -> None:
        before = runs.export_live_draft()
        given = yaml.safe_load(before)
        given["nodes"][0]["tags"] = ["vip"]
        open_drafts._add_edit(user, before, yaml.safe_dump(given))

    act_behind_locks(lambda: runs.publish_draft(run.pk, Actor("ops", user)), edit)
    draft = ConfigDraft.objects.get(owner=user)
    (change,) = open_drafts.review_draft(draft).changes
    assert [(each.path, each.after) for each in change.differences] == [("tags", ["vip"])]
    assert Node.objects.get().delay == timedelta(minutes=20)


def test_edit_of_another_user_during_a_capture_is_not_part_of_the_draft(
    user: User, second_connection: SecondConnection
) -> None:
    others = iter([timedelta(minutes=30)])

    def save() -> bool:
        for window in others:  # once: the second try finds the live configuration unchanged
            second_connection(partial(HarassmentRule.objects.filter(kind="dedupe").update, window=window))
        return save_node(delay=timedelta(minutes=20))()

    assert open_drafts.capture_edit(user, save)
    review = open_drafts.review_draft(ConfigDraft.objects.get(owner=user))
    assert (review.is_outdated, [each.label for each in review.changes]) == (False, ["guide"])


def test_edits_of_two_pages_at_once_are_both_in_the_draft(user: User, race: Race) -> None:
    saves = [save_node(delay=timedelta(minutes=20)), save_node(holdout_percent=5)]
    assert race(2, lambda number: open_drafts.capture_edit(user, saves[number])) == [True, True]
    (change,) = open_drafts.review_draft(ConfigDraft.objects.get(owner=user)).changes
    assert sorted(each.path for each in change.differences) == ["delay", "holdout"]
