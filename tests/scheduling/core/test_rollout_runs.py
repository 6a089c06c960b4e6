"""A canary that grows by steps and goes back by itself, with real events, complaints, opt-outs and failures."""

from __future__ import annotations

from dataclasses import asdict
from itertools import count
from typing import Any

import pytest
from django.contrib.auth.models import User
from django.db import OperationalError, connection, transaction
from structlog.testing import capture_logs

from scheduling.errors import Conflict, InvalidInput
from scheduling.experiments import rollout_runs
from scheduling.experiments.rollout_stats import RolloutCollector, count_version_results
from scheduling.models import AutomaticRollout, Node, RolloutMove, Touch
from scheduling.operations.commands import update_customer
from scheduling.operations.failed_tasks import Actor
from scheduling.policy.rollout import VersionCounts
from scheduling.policy.specs import hash_to_percent
from tests.scheduling.core.conftest import deliver, fall_due, pass_time
from tests.support.matrix import MatrixBuilder, RecordEvent
from tests.support.second_connection import Race, SecondConnection

ENOUGH = 12
PLAN = {"steps": [30, 60, 100], "time": 3600, "touches": ENOUGH, "judged_from": 10}
OPS = Actor("ops")
each_race = pytest.mark.django_db(transaction=True)


class RolloutCase:
    """One node with a canary; communities that get it and communities that don't."""

    def __init__(self, node: Any, record_event: RecordEvent) -> None:
        self.happen, self.numbers = record_event, count()
        self.key, self.pk = node.key, node.pk

    @property
    def node(self) -> Node:
        return Node.objects.select_related("template", "canary_template").get(pk=self.pk)

    @property
    def rollout(self) -> AutomaticRollout:
        return AutomaticRollout.objects.get()

    def speak(self, canary: bool, times: int = ENOUGH) -> list[str]:
        """Touch so many customers, each in a community that gets the canary (or not) at this percentage."""
        users: list[str] = []
        ids = []
        while len(users) < times:
            name = f"u{next(self.numbers)}"
            if (hash_to_percent(f"canary:{self.key}:guide-v2", name) < self.node.canary_percent) == canary:
                users.append(name)
                ids += self.happen(user=name, chat_id=name).task_ids
        fall_due(*ids)
        deliver(ids)
        assert {row.template.key for row in Touch.objects.filter(pk__in=ids).select_related("template")} == {
            "guide-v2" if canary else "guide"
        }
        return users

    def tally(self) -> tuple[VersionCounts, VersionCounts]:
        return count_version_results(self.rollout)

    def state(self) -> tuple[str, str, float, list[str]]:
        row, node = self.rollout, self.node
        return row.state, row.reason, node.canary_percent, node.canary_communities


@pytest.fixture
def rollout_case(matrix: MatrixBuilder, record_event: RecordEvent) -> RolloutCase:
    canary = matrix.template("guide-v2", content_type="guide")
    return RolloutCase(matrix.node(canary_template=canary, canary_communities=["vip-group"]), record_event)


@pytest.fixture
def running(rollout_case: RolloutCase) -> RolloutCase:
    rollout_runs.start_rollout(rollout_case.pk, PLAN, OPS)
    return rollout_case


def list_rollout_moves() -> list[tuple[str, str, float]]:
    return list(RolloutMove.objects.values_list("verb", "reason", "percent"))


# --- growing --------------------------------------------------------------------------------------------------------


@pytest.mark.django_db
def test_rollout_starts_at_first_step_with_author(rollout_case: RolloutCase, django_user_model: Any) -> None:
    user = User.objects.create_user("eve")
    version = rollout_case.node.version
    rollout_runs.start_rollout(rollout_case.pk, PLAN, Actor("eve", user))
    assert rollout_case.state() == ("running", "", 30, ["vip-group"])
    node = rollout_case.node
    record = node.history.first()
    assert (node.version, record.history_user, record.history_change_reason) == (
        version + 1, user, f"automatic roll-out {rollout_case.rollout}: started"
    )  # fmt: skip
    assert node.canary_guard == rollout_case.rollout.plan, "the next one begins with it"
    assert list_rollout_moves() == [("started", "", 30)]


@pytest.mark.django_db
def test_rollout_grows_after_time_and_figures(running: RolloutCase) -> None:
    assert (rollout_runs.advance_all_rollouts(), running.rollout.reason) == (0, "time")
    pass_time(hours=2)
    assert (rollout_runs.advance_all_rollouts(), running.rollout.reason) == (0, "canary")
    running.speak(canary=True)
    assert (rollout_runs.advance_all_rollouts(), running.rollout.reason) == (0, "stable")
    running.speak(canary=False)
    assert rollout_runs.advance_all_rollouts() == 1
    assert running.state() == ("running", "", 60, ["vip-group"])
    assert (rollout_runs.advance_all_rollouts(), running.rollout.reason) == (0, "time"), "a step begins anew"
    assert running.tally() == (VersionCounts(), VersionCounts())

    pass_time(hours=2)
    running.speak(canary=True)
    running.speak(canary=False)
    assert rollout_runs.advance_all_rollouts() == 1
    pass_time(hours=2)
    running.speak(canary=True)
    assert running.tally() == (VersionCounts(ENOUGH), VersionCounts(2 * ENOUGH)), (
        "at 100 % the steps before are compared with"
    )
    assert rollout_runs.advance_all_rollouts() == 1
    assert running.state() == ("finished", "", 100, ["vip-group"])
    assert rollout_runs.advance_all_rollouts() == 0
    assert list_rollout_moves() == [("started", "", 30), ("grew", "", 60), ("grew", "", 100), ("finished", "", 100)]


@pytest.mark.django_db
def test_rollout_step_is_a_node_version_with_figures(running: RolloutCase) -> None:
    running.speak(canary=True)
    running.speak(canary=False)
    pass_time(hours=2)
    rollout_runs.advance_all_rollouts()
    node, move = running.node, RolloutMove.objects.get(verb="grew")
    record = node.history.get(version=move.node_version)
    assert (record.canary_percent, record.history_user, record.history_change_reason) == (
        60, None, f"automatic roll-out {running.rollout}: grows"
    )  # fmt: skip
    assert move.figures == {"canary": asdict(VersionCounts(ENOUGH)), "stable": asdict(VersionCounts(ENOUGH))}
    assert (move.actor, move.actor_name) == (None, "")
    (planned,) = running.happen(user="new").task_ids
    assert Touch.objects.get(pk=planned).node_version == move.node_version


# --- pausing --------------------------------------------------------------------------------------------------------


@pytest.mark.django_db
def test_rollout_complaints_pause_and_reset_canary(running: RolloutCase) -> None:
    users = running.speak(canary=True)
    running.speak(canary=False)
    for user in users:
        running.happen("complaint.received", user)
    assert running.tally() == (VersionCounts(ENOUGH, 0, ENOUGH, ENOUGH), VersionCounts(ENOUGH)), (
        "a complaint opts out as well"
    )
    assert rollout_runs.advance_all_rollouts() == 1
    assert running.state() == ("paused", "limit:complaints", 0, [])
    assert list_rollout_moves()[-1] == ("paused", "limit:complaints", 0)
    (task_id,) = running.happen(user="late", chat_id="vip-group").task_ids
    fall_due(task_id)
    deliver([task_id])
    assert Touch.objects.select_related("template").get(pk=task_id).template == running.node.template
    assert rollout_runs.advance_all_rollouts() == 0, "what is paused stays paused"


@pytest.mark.django_db
def test_rollout_opt_outs_pause_and_are_attributed(running: RolloutCase) -> None:
    users = running.speak(canary=True)
    stable = running.speak(canary=False)
    for user in users:
        update_customer(user, {"opted_out": True})
    update_customer(stable[0], {"opted_out": True})
    update_customer("stranger", {"opted_out": True})
    assert running.tally() == (VersionCounts(ENOUGH, 0, 0, ENOUGH), VersionCounts(ENOUGH, 0, 0, 1))
    rollout_runs.advance_all_rollouts()
    assert running.state() == ("paused", "limit:opt_outs", 0, [])


@pytest.mark.django_db
def test_rollout_failing_text_pauses(rollout_case: RolloutCase, matrix: MatrixBuilder) -> None:
    """Nothing was sent, but it was decided which text it would have been."""
    text = rollout_case.node.canary_template.texts.get()  # type: ignore[union-attr]
    text.body = "{{ event.data.order_no }}"
    text.save()
    rollout_runs.start_rollout(rollout_case.pk, PLAN, OPS)
    rollout_case.speak(canary=True)
    rollout_case.speak(canary=False)
    assert not Touch.objects.filter(state="failed").exclude(reserved_at=None).exists(), "they hold no slots"
    assert rollout_case.tally() == (VersionCounts(ENOUGH, ENOUGH), VersionCounts(ENOUGH))
    rollout_runs.advance_all_rollouts()
    assert rollout_case.state() == ("paused", "limit:failures", 0, [])


@each_race
def test_rollout_pause_is_logged_and_measured(running: RolloutCase) -> None:
    for user in running.speak(canary=True):
        running.happen("complaint.received", user)
    running.speak(canary=False)
    with capture_logs() as lines:
        rollout_runs.advance_all_rollouts()
    (line,) = [line for line in lines if line["event"] == "rollout_paused"]
    assert (line["log_level"], line["node"], line["percent"], line["reason"]) == (
        "warning", "guide", 0, "limit:complaints"
    )  # fmt: skip
    assert line["canary"]["complained"] == ENOUGH
    told = {
        (each.name, *each.labels.values()): each.value
        for family in RolloutCollector().collect()
        for each in family.samples
    }
    assert told == {
        ("aftertouch_rollouts", "running"): 0,
        ("aftertouch_rollouts", "paused"): 1,
        ("aftertouch_rollouts_oldest_judged_seconds",): 0,
    }


@pytest.mark.django_db
def test_rollout_results_before_the_step_do_not_count(running: RolloutCase) -> None:
    for user in running.speak(canary=True):
        running.happen("complaint.received", user)
    rollout_runs.pause_rollout(running.rollout.pk, OPS)
    assert running.state() == ("paused", "person", 0, [])
    rollout_runs.resume_rollout(running.rollout.pk, OPS)
    assert running.state() == ("running", "", 30, ["vip-group"])
    assert running.tally() == (VersionCounts(), VersionCounts())


# --- people and their node ------------------------------------------------------------------------------------------


@pytest.mark.django_db
@pytest.mark.parametrize("edit", [{"canary_percent": 45}, {"canary_communities": ["other"]}, {"canary_template": None}])
def test_rollout_manual_canary_edit_pauses_and_stays(running: RolloutCase, edit: dict[str, Any]) -> None:
    node = running.node
    for name, value in edit.items():
        setattr(node, name, value)
    node.save()
    for user in running.speak(canary=False):
        update_customer(user, {"opted_out": True})
    assert rollout_runs.advance_all_rollouts() == 1
    after = running.node
    assert (running.rollout.state, running.rollout.reason, after.version) == ("paused", "edited", node.version)
    assert [getattr(after, name) for name in edit] == list(edit.values())
    rollout_runs.stop_rollout(running.rollout.pk, OPS)
    assert running.node.version == node.version, "nor does stopping it undo what somebody wrote"


@pytest.mark.django_db
def test_rollout_unrelated_edit_does_not_pause(running: RolloutCase) -> None:
    node = running.node
    node.over_cap = "defer"
    node.save()
    assert (rollout_runs.advance_all_rollouts(), running.rollout.reason) == (0, "time")


@pytest.mark.django_db
def test_rollout_new_text_pauses_and_resets_canary(running: RolloutCase) -> None:
    text = running.node.canary_template.texts.get()  # type: ignore[union-attr]
    text.body = "another"
    text.save()
    rollout_runs.advance_all_rollouts()
    assert running.state() == ("paused", "content", 0, [])
    rollout_runs.resume_rollout(running.rollout.pk, OPS)
    assert (rollout_runs.advance_all_rollouts(), running.rollout.reason) == (0, "time"), (
        "whoever resumes stands for the new text"
    )


@each_race
def test_rollout_edit_during_judgement_is_kept(
    running: RolloutCase, second_connection: SecondConnection, monkeypatch: pytest.MonkeyPatch
) -> None:
    running.speak(canary=True)
    running.speak(canary=False)
    pass_time(hours=2)

    def edit_during_judgement(rollout: AutomaticRollout) -> Any:
        second_connection(lambda: _edit(running.pk, 45))
        return count_version_results(rollout)

    monkeypatch.setattr(rollout_runs, "count_version_results", edit_during_judgement)
    assert rollout_runs.advance_all_rollouts() == 1
    assert running.state() == ("paused", "edited", 45, ["vip-group"])


def _edit(pk: int, percent: float) -> None:
    node = Node.objects.get(pk=pk)
    node.canary_percent = percent
    node.save()


# --- two at once, and a death between -------------------------------------------------------------------------------


@each_race
def test_rollout_concurrent_passes_advance_once(running: RolloutCase, race: Race) -> None:
    running.speak(canary=True)
    running.speak(canary=False)
    pass_time(hours=2)
    assert sum(race(4, lambda number: rollout_runs.advance_all_rollouts())) == 1
    assert running.state() == ("running", running.rollout.reason, 60, ["vip-group"])
    assert list_rollout_moves() == [("started", "", 30), ("grew", "", 60)]


@each_race
def test_rollout_manual_pause_does_not_wait_for_count(
    running: RolloutCase, second_connection: SecondConnection, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And what was counted for the time before moves nothing any more."""
    for user in running.speak(canary=True):
        running.happen("complaint.received", user)
    running.speak(canary=False)

    def pause_during_judgement(rollout: AutomaticRollout) -> Any:
        second_connection(lambda: rollout_runs.pause_rollout(rollout.pk, OPS))
        second_connection(lambda: rollout_runs.resume_rollout(rollout.pk, OPS))
        return count_version_results(rollout)

    monkeypatch.setattr(rollout_runs, "count_version_results", pause_during_judgement)
    assert rollout_runs.advance_all_rollouts() == 0
    assert running.state() == ("running", "", 30, ["vip-group"])
    assert [verb for verb, _, _ in list_rollout_moves()] == ["started", "paused", "resumed"]


@each_race
def test_rollout_locked_row_is_skipped(running: RolloutCase, second_connection: SecondConnection) -> None:
    with transaction.atomic():
        AutomaticRollout.objects.select_for_update().get()
        assert second_connection(rollout_runs.advance_all_rollouts) == 0
    assert running.rollout.judged_at is None


@each_race
def test_rollout_and_config_apply_do_not_deadlock(
    running: RolloutCase, second_connection: SecondConnection, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between them each would wait for the other."""
    edit, found = rollout_runs.edit_node, []

    def lock(patience: str = "100ms") -> bool:
        try:
            with transaction.atomic(), connection.cursor() as cursor:
                cursor.execute("SELECT set_config('lock_timeout', %s, true)", [patience])
                cursor.execute("LOCK TABLE scheduling_node IN SHARE ROW EXCLUSIVE MODE")
        except OperationalError:
            return False
        return True

    def apply_during_entry(*given: Any, **others: Any) -> None:
        found.append(second_connection(lock))
        edit(*given, **others)

    monkeypatch.setattr(rollout_runs, "edit_node", apply_during_entry)
    rollout_runs.pause_rollout(running.rollout.pk, OPS)
    assert found == [False]
    assert second_connection(lambda: lock("15s"))


@each_race
def test_rollout_concurrent_starts_create_one(rollout_case: RolloutCase, race: Race) -> None:
    def start(number: int) -> str:
        try:
            return str(rollout_runs.start_rollout(rollout_case.pk, PLAN, Actor(f"p{number}")).pk)
        except Conflict:
            return ""

    assert sorted(bool(each) for each in race(4, start)) == [False, False, False, True]
    assert list_rollout_moves() == [("started", "", 30)]


@each_race
def test_rollout_crash_in_step_changes_nothing(running: RolloutCase, monkeypatch: pytest.MonkeyPatch) -> None:
    """After the node was written and before the move was noted."""
    running.speak(canary=True)
    running.speak(canary=False)
    pass_time(hours=2)
    version = running.node.version
    with monkeypatch.context() as patch:
        patch.setattr(RolloutMove.objects, "create", _die)
        assert rollout_runs.advance_all_rollouts() == 0
    assert (running.node.version, running.state(), list_rollout_moves()) == (
        version, ("running", "", 30, ["vip-group"]), [("started", "", 30)]
    )  # fmt: skip
    assert rollout_runs.advance_all_rollouts() == 1
    assert running.state() == ("running", "", 60, ["vip-group"])


@each_race
def test_rollout_without_figures_pauses_after_5_minutes(running: RolloutCase, monkeypatch: pytest.MonkeyPatch) -> None:
    """Counting takes too long, minute by minute: a guard that cannot see must not let a harmful canary be."""

    def too_slow(rollout: AutomaticRollout) -> Any:
        with connection.cursor() as cursor:
            cursor.execute("SET LOCAL statement_timeout = '50ms'")
            cursor.execute("SELECT pg_sleep(20)")

    rollout_runs.advance_all_rollouts()
    judged = running.rollout.figures
    monkeypatch.setattr(rollout_runs, "count_version_results", too_slow)
    pass_time(minutes=4)
    assert (rollout_runs.advance_all_rollouts(), running.rollout.state) == (0, "running"), (
        "that passes by itself, perhaps"
    )
    pass_time(minutes=1)
    assert rollout_runs.advance_all_rollouts() == 1
    assert running.state() == ("paused", "unseen", 0, [])
    assert (list_rollout_moves()[-1], running.rollout.figures) == (("paused", "unseen", 0), judged)
    assert rollout_runs.advance_all_rollouts() == 0


@each_race
def test_rollout_edited_without_figures_is_kept(running: RolloutCase, monkeypatch: pytest.MonkeyPatch) -> None:
    _edit(running.pk, 45)
    pass_time(minutes=10)
    monkeypatch.setattr(rollout_runs, "count_version_results", _die)
    assert rollout_runs.advance_all_rollouts() == 1
    assert running.state() == ("paused", "edited", 45, ["vip-group"])


def _die(*_: Any, **__: Any) -> None:
    raise SystemError("killed")


@each_race
def test_rollout_failing_count_does_not_block_others(
    running: RolloutCase, matrix: MatrixBuilder, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = matrix.node("other", canary_template=matrix.template("guide-v2"))
    rollout_runs.start_rollout(other.pk, PLAN, OPS)
    node = Node.objects.get(pk=other.pk)
    node.canary_percent = 1
    node.save()

    def broken(rollout: AutomaticRollout) -> Any:
        if rollout.node_id == running.pk:
            raise ZeroDivisionError
        return count_version_results(rollout)

    monkeypatch.setattr(rollout_runs, "count_version_results", broken)
    assert rollout_runs.advance_all_rollouts() == 1
    assert AutomaticRollout.objects.get(node=other).reason == "edited"


# --- what is refused ------------------------------------------------------------------------------------------------


@pytest.mark.django_db
def test_rollout_start_refuses_invalid_or_second(rollout_case: RolloutCase, matrix: MatrixBuilder) -> None:
    with pytest.raises(InvalidInput, match="steps"):
        rollout_runs.start_rollout(rollout_case.pk, PLAN | {"steps": []}, OPS)
    bare = matrix.node("bare")
    with pytest.raises(InvalidInput, match="canary_template"):
        rollout_runs.start_rollout(bare.pk, PLAN, OPS)
    rollout_runs.start_rollout(rollout_case.pk, PLAN, OPS)
    with pytest.raises(Conflict):
        rollout_runs.start_rollout(rollout_case.pk, PLAN, OPS)


@pytest.mark.django_db
def test_rollout_manual_actions_apply_once(running: RolloutCase) -> None:
    pk = running.rollout.pk
    with pytest.raises(Conflict):
        rollout_runs.resume_rollout(pk, OPS)
    rollout_runs.pause_rollout(pk, OPS)
    with pytest.raises(Conflict):
        rollout_runs.pause_rollout(pk, OPS)
    rollout_runs.stop_rollout(pk, OPS)
    assert running.state() == ("stopped", "", 0, [])
    for act in (rollout_runs.pause_rollout, rollout_runs.resume_rollout, rollout_runs.stop_rollout):
        with pytest.raises(Conflict):
            act(pk, OPS)
    assert [(move.verb, move.actor_name) for move in RolloutMove.objects.all()] == [
        ("started", "ops"), ("paused", "ops"), ("stopped", "ops")
    ]  # fmt: skip
    rollout_runs.start_rollout(running.pk, PLAN, OPS)


@pytest.mark.django_db
def test_rollout_resume_refuses_another_canary(running: RolloutCase, matrix: MatrixBuilder) -> None:
    rollout_runs.pause_rollout(running.rollout.pk, OPS)
    node = running.node
    node.canary_template = matrix.template("guide-v3")
    node.save()
    with pytest.raises(Conflict):
        rollout_runs.resume_rollout(running.rollout.pk, OPS)
    assert running.node.canary_percent == 0
