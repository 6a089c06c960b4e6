"""When a message is due, by a clock alone."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

import pytest

from scheduling.models import Alert
from scheduling.monitoring.alerting.alert_actions import AlertAction, create_alert, decide_alert_action, mark_notified

BEGAN = datetime(2026, 11, 21, 8, 0, tzinfo=UTC)
MINUTE = timedelta(minutes=1)


class AlertTimeline:
    def __init__(self, *, rising: bool = False, remind_every: timedelta | None = timedelta(hours=1)) -> None:
        self.alert: Alert = create_alert(1, "overdue", "", 10.0, BEGAN)
        self.rising, self.remind_every = rising, remind_every

    def at(self, minutes: float, value: float | None, *, delivered: bool = True) -> AlertAction:
        now = BEGAN + minutes * MINUTE
        word = decide_alert_action(
            self.alert, value, now, holds_for=2 * MINUTE, remind_every=self.remind_every, rising=self.rising
        )
        if word and word != AlertAction.DROP:
            self.alert.tried = True
            if delivered:
                mark_notified(self.alert, word, now)
        return word


def test_alert_fires_once_after_hold_time() -> None:
    timeline = AlertTimeline()
    assert [timeline.at(minute, 10) for minute in (0, 1, 2, 3, 4)] == ["", "", AlertAction.FIRE, "", ""]


def test_alert_over_before_it_fired_is_dropped() -> None:
    timeline = AlertTimeline()
    assert [timeline.at(0, 10), timeline.at(0.2, None), timeline.at(0.4, None)] == ["", "", AlertAction.DROP]


def test_alert_survives_one_missed_observation() -> None:
    """Present in one of six evaluations, and exactly when the message is due."""
    timeline = AlertTimeline()
    seen = {sixth / 6: None if sixth % 6 == 0 else 10.0 for sixth in range(1, 14)}
    words = {minutes: timeline.at(minutes, value) for minutes, value in seen.items()}
    assert [minutes for minutes, word in words.items() if word] == [13 / 6]
    assert words[13 / 6] == AlertAction.FIRE
    assert timeline.alert.since == BEGAN


def test_alert_single_late_miss_restarts_hold_time() -> None:
    timeline = AlertTimeline()
    assert [timeline.at(0, 10), timeline.at(2, None), timeline.at(4, 10), timeline.at(6, 10)] == [
        "",
        "",
        "",
        AlertAction.FIRE,
    ]
    assert timeline.alert.since == BEGAN + 4 * MINUTE


def test_alert_is_reminded_at_the_interval() -> None:
    timeline = AlertTimeline()
    assert [timeline.at(minute, 10) for minute in (2, 61, 62, 63, 122)] == [
        AlertAction.FIRE, "", AlertAction.REMIND, "", AlertAction.REMIND,
    ]  # fmt: skip
    quiet = AlertTimeline(remind_every=None)
    assert [quiet.at(minute, 10) for minute in (2, 62, 6000)] == [AlertAction.FIRE, "", ""]


def test_alert_resolves_after_hold_time() -> None:
    """A flickering condition neither ends nor starts again."""
    timeline = AlertTimeline()
    seen = [(2, 10), (3, None), (4, 10), (5, None), (6, None), (7, None)]
    words = [timeline.at(minute, value) for minute, value in seen]
    assert words == [AlertAction.FIRE, "", "", "", "", AlertAction.RESOLVE]
    assert timeline.alert.absent_since == BEGAN + 5 * MINUTE


def test_alert_undelivered_is_repeated_until_delivered() -> None:
    timeline = AlertTimeline()
    assert [timeline.at(minute, 10, delivered=False) for minute in (2, 3)] == [AlertAction.FIRE, AlertAction.FIRE]
    assert timeline.at(4, 10) == AlertAction.FIRE
    assert timeline.at(5, 10) == ""


def test_alert_undelivered_is_still_resolved() -> None:
    timeline = AlertTimeline()
    assert timeline.at(2, 10, delivered=False) == AlertAction.FIRE
    assert [timeline.at(3, None), timeline.at(5, None)] == ["", AlertAction.RESOLVE]


@pytest.mark.parametrize(
    ("figures", "word"), [((10, 10, 10), AlertAction.FIRE), ((10, 30, 50), AlertAction.FIRE), ((10, 9, 8), "")]
)
def test_rising_alert_ignores_shrinking_figures(figures: tuple[float, ...], word: str) -> None:
    timeline = AlertTimeline(rising=True)
    assert [timeline.at(minute, value) for minute, value in enumerate(figures)][-1] == word
