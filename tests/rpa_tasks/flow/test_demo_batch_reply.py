"""Each message is answered once, whatever happens to the runs."""

from __future__ import annotations

import signal
from collections.abc import Callable
from typing import Any

import pytest

pytestmark = pytest.mark.browser

ONCE = {f"s1-m{number}": 1 for number in range(1, 6)}


@pytest.fixture
def answer(flows: Any, site: Any, port: int) -> Callable[..., Any]:
    """Begin a run."""

    def answer(reply: str = "It is on its way.", **payload: Any) -> Any:
        whole = {"site": site.url, "reply": reply, "login": True} | payload
        return flows.begin("demo_batch_reply", whole, debug_port=port)

    return answer


def ended(run: Any) -> Any:
    run.end()
    assert run.process.returncode == 0, run.errors
    return run.result


def test_what_waits_is_answered_and_what_was_answered_stays(answer: Callable[..., Any], site: Any) -> None:
    run = answer("Dear <b>, 您好！\nSoon.")
    assert ended(run) == {"answered": 5, "already": 0}
    assert [line["progress"] for line in run.lines if "progress" in line] == [0.2, 0.4, 0.6, 0.8, 1.0]
    assert site.effects()["replies"] == ONCE
    with site.market.lock:
        message = site.market.shop("s1").messages["s1-m1"]
        assert [reply.replace("\r", "") for reply in message.replies] == ["Dear <b>, 您好！\nSoon."]

    assert ended(answer()) == {"answered": 0, "already": 0}
    site.ask("/admin/message?shop=s1&text=And+now", post=True)
    assert ended(answer()) == {"answered": 1, "already": 0}
    assert site.effects()["replies"] == ONCE | {"s1-m6": 1}


def test_only_one_buyer_is_answered(answer: Callable[..., Any], site: Any) -> None:
    assert ended(answer(only="u2")) == {"answered": 1, "already": 0}
    assert ended(answer(only="u99")) == {"answered": 0, "already": 0}
    assert [key for key, count in site.effects()["replies"].items() if count] == ["s1-m2"]


def test_runs_that_race_answer_each_message_once(answer: Callable[..., Any], site: Any) -> None:
    runs = [answer() for _ in range(3)]
    results = [ended(run) for run in runs]
    assert site.effects()["replies"] == ONCE
    assert sum(result["answered"] for result in results) == 5


@pytest.mark.faults
@pytest.mark.parametrize("message", ["s1-m1", "s1-m3"])
def test_a_run_that_is_killed_behind_its_click_is_taken_up(answer: Callable[..., Any], site: Any, message: str) -> None:
    site.hold("POST", "/messages/reply", message=message)
    run = answer()
    site.reach()
    run.signal(signal.SIGKILL)
    run.end()
    later = answer()
    site.release()  # the browser lives on, and with it the answer that was on its way
    ended(later)
    assert site.effects()["replies"] == ONCE


@pytest.mark.faults
def test_a_stopped_run_adds_nothing_when_it_wakes(answer: Callable[..., Any], site: Any) -> None:
    site.hold("POST", "/messages/reply", message="s1-m2")
    early = answer()
    site.reach()
    early.signal(signal.SIGSTOP)
    site.release()
    later = ended(answer())
    early.signal(signal.SIGCONT)
    earlier = ended(early)
    assert site.effects()["replies"] == ONCE
    assert later["answered"] + earlier["answered"] == 5
    assert earlier["already"] == 3


def test_a_login_that_is_lost_on_the_way_is_no_answer(answer: Callable[..., Any], site: Any) -> None:
    site.hold("POST", "/messages/reply", message="s1-m3")
    run = answer()
    site.reach()
    site.ask("/switch?expire_sessions=1")
    site.release()
    assert run.end() == 77
    assert [key for key, count in site.effects()["replies"].items() if count] == ["s1-m1", "s1-m2"]
    ended(answer())
    assert site.effects()["replies"] == ONCE


@pytest.mark.parametrize("payload", [{"reply": ""}, {"reply": None}, {"only": 7}, {"only": ""}, {"reply": "x" * 1001}])
def test_a_payload_that_does_not_fit_needs_a_person(
    answer: Callable[..., Any], site: Any, payload: dict[str, Any]
) -> None:
    run = answer(**payload)
    assert run.end() == 65, run.errors
    site.ask("/admin/message?shop=s1", post=True)
    assert set(site.effects()["replies"].values()) == {0}
