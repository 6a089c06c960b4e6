"""Two users, or two pages of one user, act on a draft at the same moment."""

from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from functools import partial

import pytest
from django.contrib.auth.models import User

from scheduling.errors import Conflict
from scheduling.experiments import drafts
from scheduling.models import AuditEntry, ConfigDraft, HarassmentRule, Node
from scheduling.operations.failed_tasks import Actor
from tests.support.drafts import replay_draft
from tests.support.second_connection import act_and_close, act_behind_locks, await_lock_waits
from tests.support.waiting import WAIT_LIMIT

pytestmark = pytest.mark.django_db(transaction=True)


@pytest.fixture
def node(transactional_db, matrix):
    return matrix.node(delay=timedelta(minutes=15))


@pytest.fixture
def user(node):
    return User.objects.create_user("ops")


def save_node(**values):
    def save():
        node = Node.objects.get()
        for name, value in values.items():
            setattr(node, name, value)
        node.save()
        return True

    return save


def replayed(user):
    return replay_draft(ConfigDraft.objects.get(owner=user))


def list_changes(user):
    changes = drafts.plan_edits(ConfigDraft.objects.get(owner=user)).changes
    return {change.label: sorted(each.path for each in change.differences) for change in changes}


def test_two_publications_of_a_draft_publish_it_once(user, race):
    assert drafts.capture_edit(user, save_node(delay=timedelta(minutes=20)))
    draft = replayed(user)
    seen = drafts.compute_seen(draft)

    def publish(number):
        try:
            drafts.publish_draft(draft.pk, seen, Actor(f"ops{number}", None, f"reason {number}"))
        except Conflict:
            return "refused"
        return f"reason {number}"

    outcomes = race(2, publish)
    (published,) = set(outcomes) - {"refused"}
    assert sorted(outcomes) == sorted([published, "refused"])
    latest = Node.objects.get().history.latest()
    assert (Node.history.count(), latest.history_change_reason) == (2, published)
    assert AuditEntry.objects.filter(action="published").count() == 1


def test_edit_while_its_draft_is_published_opens_a_new_draft(user):
    assert drafts.capture_edit(user, save_node(delay=timedelta(minutes=20)))
    draft = replayed(user)
    seen = drafts.compute_seen(draft)
    act_behind_locks(
        lambda: drafts.publish_draft(draft.pk, seen, Actor("ops", user, "r")),
        lambda: drafts.capture_edit(user, save_node(tags=["vip"])),
    )
    assert list_changes(user) == {"guide": ["tags"]}
    assert Node.objects.get().delay == timedelta(minutes=20)


def test_edit_of_another_user_waits_until_an_edit_is_captured(user):
    """It would seem part of the draft."""
    rules = HarassmentRule.objects.filter(kind="dedupe")

    def save():
        editing.append(pool.submit(act_and_close, lambda: rules.update(window=timedelta(minutes=30))))
        await_lock_waits()
        return save_node(delay=timedelta(minutes=20))()

    editing = []
    with ThreadPoolExecutor(1) as pool:
        assert drafts.capture_edit(user, save)
        assert editing[0].result(WAIT_LIMIT) == 1
    assert list_changes(user) == {"guide": ["delay"]}


def test_two_clicks_at_once_discard_a_draft(user):
    """The later one read that the draft had changed."""
    assert drafts.capture_edit(user, save_node(delay=timedelta(minutes=20)))
    seen = drafts.compute_seen(ConfigDraft.objects.get())
    discard = partial(drafts.discard_draft, user, seen)
    act_behind_locks(discard, discard)
    assert not ConfigDraft.objects.exists()


def test_edits_of_two_pages_at_once_are_both_in_the_draft(user, race):
    saves = [save_node(delay=timedelta(minutes=20)), save_node(holdout_percent=5)]
    assert race(2, lambda number: drafts.capture_edit(user, saves[number])) == [True, True]
    assert list_changes(user) == {"guide": ["delay", "holdout"]}
