"""A canary that grows by steps and is withdrawn by itself, with real events, complaints and failures."""

from itertools import count

import pytest
from django.contrib.auth.models import User
from structlog.testing import capture_logs

from scheduling.db_timeouts import Deadline
from scheduling.errors import Conflict, InvalidInput
from scheduling.experiments import rollouts
from scheduling.experiments.rollouts import advance_rollouts
from scheduling.models import AutomaticRollout, Node, Touch
from scheduling.monitoring.collectors import read_rollouts
from scheduling.operations.failed_tasks import Actor
from scheduling.policy.specs import hash_to_percent
from tests.scheduling.core.conftest import deliver, fall_due, pass_time

ENOUGH = 12
PLAN = {"steps": [30, 60, 100], "time": 3600, "touches": ENOUGH}
OPS = Actor("ops")
pytestmark = pytest.mark.django_db(transaction=True)


class RolloutCase:
    """One node with a canary; communities that get it and communities that don't."""

    def __init__(self, node, record_event):
        self.happen, self.numbers = record_event, count()
        self.key, self.pk = node.key, node.pk

    @property
    def node(self):
        return Node.objects.select_related("template", "canary_template").get(pk=self.pk)

    @property
    def rollout(self):
        return AutomaticRollout.objects.get(pk=self.pk)

    def speak(self, canary=True, times=ENOUGH):
        """Touch so many customers, each in a community that gets the canary (or not) at this percentage."""
        users = []
        ids = []
        while len(users) < times:
            name = f"u{next(self.numbers)}"
            if (hash_to_percent(f"canary:{self.key}:guide-v2", name) < self.node.canary_percent) == canary:
                users.append(name)
                ids += self.happen(user=name, chat_id=name).task_ids
        fall_due(*ids)
        deliver(ids)
        return users

    def counts(self):
        row = self.rollout
        return row.ended, row.failed, row.complained

    def state(self):
        row, node = self.rollout, self.node
        return row.state, row.reason, node.canary_percent, node.canary_communities


@pytest.fixture
def rollout_case(matrix, record_event):
    canary = matrix.template("guide-v2", content_type="guide")
    return RolloutCase(matrix.node(canary_template=canary, canary_communities=["vip-group"]), record_event)


@pytest.fixture
def running(rollout_case):
    rollouts.start_rollout(rollout_case.pk, PLAN, OPS)
    return rollout_case


# --- growing --------------------------------------------------------------------------------------------------------


def test_rollout_starts_once_at_its_first_step_with_author(rollout_case, matrix):
    with pytest.raises(InvalidInput, match="steps"):
        rollouts.start_rollout(rollout_case.pk, PLAN | {"steps": []}, OPS)
    with pytest.raises(InvalidInput, match="canary_template"):
        rollouts.start_rollout(matrix.node("bare").pk, PLAN, OPS)
    user = User.objects.create_user("eve")
    version = rollout_case.node.version
    rollouts.start_rollout(rollout_case.pk, PLAN, Actor("eve", user))
    assert rollout_case.state() == ("running", "", 30, ["vip-group"])
    record = rollout_case.node.history.first()
    assert (record.version, record.history_user, record.history_change_reason) == (
        version + 1, user, "automatic roll-out: started"
    )  # fmt: skip
    assert rollout_case.node.canary_guard == rollout_case.rollout.plan, "the next one begins with it"
    with pytest.raises(Conflict):
        rollouts.start_rollout(rollout_case.pk, PLAN, OPS)


def test_rollout_grows_after_time_and_touches_and_finishes(running):
    advance_rollouts()
    assert running.rollout.reason == "time"
    pass_time(hours=2)
    advance_rollouts()
    assert running.rollout.reason == "touches"
    running.speak()
    running.speak(canary=False)
    advance_rollouts()
    assert running.counts() == (0, 0, 0), "they ended just now"
    pass_time(minutes=5)
    advance_rollouts()
    assert (running.state(), running.counts()) == (("running", "", 60, ["vip-group"]), (0, 0, 0))
    record = running.node.history.first()
    assert (record.canary_percent, record.history_user, record.history_change_reason) == (
        60, None, "automatic roll-out: grows"
    )  # fmt: skip
    for state in ("running", "finished"):
        running.speak()
        for _ in range(3):  # a pass counts the ends of an hour at most
            pass_time(minutes=50)
            advance_rollouts()
        assert (running.rollout.state, running.node.canary_percent) == (state, 100)
    version = running.node.version
    advance_rollouts()
    assert running.node.version == version


def test_each_end_counts_once_and_only_of_the_canary_at_this_step(running, matrix, record_event):
    matrix.node("other", trigger="other", template=matrix.template("guide-v2"))
    users = running.speak()
    running.speak(canary=False)
    others = [task_id for number in range(3) for task_id in running.happen("other", f"other-{number}").task_ids]
    fall_due(*others)
    deliver(others)
    assert set(Touch.objects.values_list("state", flat=True)) == {"delivered"}
    for _ in range(4):
        pass_time(minutes=2)
        advance_rollouts()
    assert running.counts() == (ENOUGH, 0, 0)
    running.happen("complaint.received", users[0])
    running.happen("complaint.received", users[0])
    pass_time(minutes=5)
    advance_rollouts()
    assert running.counts() == (ENOUGH, 0, 1)


# --- withdrawn ------------------------------------------------------------------------------------------------------


def test_complaints_withdraw_the_canary_with_log_and_metrics(running):
    for user in running.speak():
        running.happen("complaint.received", user)
    pass_time(minutes=5)
    with capture_logs() as lines:
        advance_rollouts()
    assert (running.state(), running.counts()) == (("withdrawn", "complaints", 0, []), (ENOUGH, 0, ENOUGH))
    (line,) = [line for line in lines if line["event"] == "rollout_withdrawn"]
    assert (line["log_level"], line["node"], line["reason"], line["complained"]) == (
        "warning", "guide", "complaints", ENOUGH,
    )  # fmt: skip
    assert read_states() == {"running": 0, "withdrawn": 1}
    (task_id,) = running.happen(user="late", chat_id="vip-group").task_ids
    fall_due(task_id)
    deliver([task_id])
    assert Touch.objects.select_related("template").get(pk=task_id).template == running.node.template
    save_node(running, canary_template=None)
    assert read_states() == {"running": 0, "withdrawn": 0}, "a person has removed it"


def read_states():
    family = next(iter(read_rollouts(Deadline(60.0))))
    return {each.labels["state"]: each.value for each in family.samples}


def test_failing_text_withdraws_the_canary(rollout_case):
    """Nothing was sent, but it was decided which text it would have been."""
    text = rollout_case.node.canary_template.texts.get()
    text.body = "{{ event.data.order_no }}"
    text.save()
    rollouts.start_rollout(rollout_case.pk, PLAN, OPS)
    rollout_case.speak()
    pass_time(minutes=5)
    advance_rollouts()
    assert (rollout_case.state(), rollout_case.counts()) == (("withdrawn", "failures", 0, []), (ENOUGH, ENOUGH, 0))


def test_canary_without_figures_is_withdrawn_after_5_minutes(running, monkeypatch):
    """Counting takes too long, minute by minute: a guard that cannot see must not let a harmful canary be."""
    advance_rollouts()
    monkeypatch.setattr(rollouts, "read_plan", _fail)
    pass_time(minutes=4)
    advance_rollouts()
    assert running.rollout.state == "running"
    pass_time(minutes=1)
    advance_rollouts()
    assert running.state() == ("withdrawn", "unseen", 0, [])


def _fail(*_):
    raise ZeroDivisionError


def test_failing_rollout_does_not_stop_others(running, matrix):
    other = matrix.node("other", canary_template=matrix.template("guide-v2"))
    rollouts.start_rollout(other.pk, PLAN, OPS)
    AutomaticRollout.objects.filter(pk=running.pk).update(plan={"steps": [30], "time": "soon"})
    advance_rollouts()
    assert AutomaticRollout.objects.get(pk=other.pk).reason == "time"
    assert running.rollout.judged_at is None


# --- people and their node ------------------------------------------------------------------------------------------


def save_node(case, **values):
    node = case.node
    for name, value in values.items():
        setattr(node, name, value)
    node.save()
    return node


@pytest.mark.parametrize("edit", [{"canary_percent": 45}, {"canary_template": None}])
def test_manual_canary_edit_ends_the_rollout_and_stays(running, edit):
    save_node(running, over_cap="defer")
    advance_rollouts()
    assert running.state() == ("running", "time", 30, ["vip-group"]), "that edit has nothing to do with it"
    node = save_node(running, **edit)
    advance_rollouts()
    after = running.node
    assert (running.rollout.state, running.rollout.reason, after.version) == ("stopped", "edited", node.version)
    assert [getattr(after, name) for name in edit] == list(edit.values())


def test_new_text_withdraws_the_canary(running):
    text = running.node.canary_template.texts.get()
    text.body = "another"
    text.save()
    advance_rollouts()
    assert running.state() == ("withdrawn", "content", 0, [])
    rollouts.start_rollout(running.pk, PLAN, OPS)
    advance_rollouts()
    assert running.state() == ("running", "time", 30, []), "who starts again stands for the new text"


def test_stopped_rollout_withdraws_the_canary_once(running):
    rollouts.stop_rollout(running.pk, OPS)
    assert running.state() == ("stopped", "", 0, [])
    with pytest.raises(Conflict):
        rollouts.stop_rollout(running.pk, OPS)


# --- two at once, and a death between -------------------------------------------------------------------------------


def test_concurrent_passes_advance_once(running, race):
    running.speak()
    pass_time(minutes=59)
    pass_time(minutes=10)
    advance_rollouts()
    version = running.node.version
    race(4, lambda number: advance_rollouts())
    assert (running.state()[2], running.node.version) == (60, version + 1)


def test_edit_while_figures_are_counted_is_kept(running, second_connection, monkeypatch):
    read = rollouts.sql.rows

    def edit_meanwhile(statement, given):
        if "scheduling_complaint" in statement:
            second_connection(lambda: rollouts.stop_rollout(running.pk, OPS))
        return read(statement, given)

    monkeypatch.setattr(rollouts.sql, "rows", edit_meanwhile)
    advance_rollouts()
    assert running.state() == ("stopped", "", 0, [])


def test_concurrent_starts_create_one(rollout_case, race):
    def start(number):
        try:
            rollouts.start_rollout(rollout_case.pk, PLAN, Actor(f"p{number}"))
        except Conflict:
            return False
        return True

    assert sum(race(4, start)) == 1
