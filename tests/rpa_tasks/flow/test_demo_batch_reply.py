"""Each message is answered once, whatever happens to the runs."""

import signal

import pytest

ONCE = {f"s1-m{number}": 1 for number in range(1, 6)}


@pytest.fixture
def start_reply(flows, site, port):
    """Start a run."""

    def start_reply(reply="It is on its way.", **payload):
        whole = {"site": site.url, "reply": reply, "login": True} | payload
        return flows.begin("demo_batch_reply", whole, debug_port=port)

    return start_reply


def end_run(run):
    run.end()
    assert run.process.returncode == 0, run.errors
    return run.result


def test_batch_reply_answers_each_waiting_message_once(start_reply, site):
    run = start_reply("Dear <b>, 您好！\nSoon.")
    assert end_run(run) == {"answered": 5, "already": 0}
    assert [line["progress"] for line in run.lines if "progress" in line] == [0.2, 0.4, 0.6, 0.8, 1.0]
    assert site.effects()["replies"] == ONCE
    message = site.market.shop("s1").messages["s1-m1"]
    assert [reply.replace("\r", "") for reply in message.replies] == ["Dear <b>, 您好！\nSoon."]

    assert end_run(start_reply()) == {"answered": 0, "already": 0}
    site.ask("/admin/message?shop=s1&text=And+now", post=True)
    assert end_run(start_reply()) == {"answered": 1, "already": 0}
    assert site.effects()["replies"] == ONCE | {"s1-m6": 1}


def test_batch_reply_answers_only_given_buyer(start_reply, site):
    assert end_run(start_reply(only="u2")) == {"answered": 1, "already": 0}
    assert [key for key, count in site.effects()["replies"].items() if count] == ["s1-m2"]


def test_concurrent_batch_replies_answer_each_message_once(start_reply, site):
    runs = [start_reply() for _ in range(3)]
    results = [end_run(run) for run in runs]
    assert site.effects()["replies"] == ONCE
    assert sum(result["answered"] for result in results) == 5


def test_killed_batch_reply_is_continued_without_repeats(start_reply, site):
    site.hold("POST", "/messages/reply", message="s1-m3")
    run = start_reply()
    site.reach()
    run.signal(signal.SIGKILL)
    run.end()
    later = start_reply()
    site.release()  # the browser lives on, and with it the answer that was on its way
    end_run(later)
    assert site.effects()["replies"] == ONCE


def test_resumed_batch_reply_adds_no_answer(start_reply, site):
    site.hold("POST", "/messages/reply", message="s1-m2")
    early = start_reply()
    site.reach()
    early.signal(signal.SIGSTOP)
    site.release()
    later = end_run(start_reply())
    early.signal(signal.SIGCONT)
    earlier = end_run(early)
    assert site.effects()["replies"] == ONCE
    assert later["answered"] + earlier["answered"] == 5
    assert earlier["already"] == 3


def test_batch_reply_with_lost_login_exits_without_answer(start_reply, site):
    site.hold("POST", "/messages/reply", message="s1-m3")
    run = start_reply()
    site.reach()
    site.ask("/switch?expire_sessions=1")
    site.release()
    assert run.end() == 77
    assert [key for key, count in site.effects()["replies"].items() if count] == ["s1-m1", "s1-m2"]
    end_run(start_reply())
    assert site.effects()["replies"] == ONCE


@pytest.mark.parametrize("payload", [{"reply": ""}, {"only": 7}, {"reply": "x" * 1001}])
def test_batch_reply_refuses_invalid_payload(start_reply, site, payload):
    run = start_reply(**payload)
    assert run.end() == 65, run.errors
    site.ask("/admin/message?shop=s1", post=True)
    assert set(site.effects()["replies"].values()) == {0}
