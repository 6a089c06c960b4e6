"""Which messages the inbox gets, and which frames are counted."""

import json
from datetime import timedelta

import pytest

from sessions.frames import Frame
from sessions.policy import CUSTOMER, Policy
from sessions.store import stats
from sessions.store.client import StoreUnavailable
from sessions.store.inbox import START, Post
from sessions.store.sessions import COUNTED, DROPPED, FrameEffect
from sessions.websocket.connection import FrameRequest, write_frames
from tests.support.tables import each_row


@pytest.fixture
def store(chats):
    chats.policies(default=Policy(timedelta(seconds=60), after=CUSTOMER))
    return chats.store


def message(name, sender="user", *, session="s1", seq=None, epoch=""):
    post = Post(session, name, sender, "hi", key=f"{sender}:{name}", seq=seq)
    return FrameRequest(Frame(session, "ann", sender=sender, seq=seq, epoch=epoch), post)


def write(store, *requests):
    """Return what became of the message and of the frame."""
    found = write_frames(store, requests)
    assert all(isinstance(each, FrameEffect) and each.posted for each in found)
    return [(each.posted.outcome, each.outcome) for each in found]


def awaited(store):
    return stats.session_snapshot(store, "s1").awaited


NEW, KNOWN, LATE = ("stored", COUNTED), ("duplicate", DROPPED), ("replayed", DROPPED)


@each_row(
    "messages, expected",
    [
        ([("a", 5, ""), ("b", 6, "")], [NEW, NEW]),
        ([("a", 5, ""), ("b", 4, "")], [NEW, LATE]),
        ([("a", 5, ""), ("b", 5, "")], [NEW, LATE]),
        ([("a", 5, ""), ("a", 5, "")], [NEW, KNOWN]),
        ([("a", 5, "one"), ("b", 1, "two")], [NEW, NEW]),
        ([("a", 5, "one"), ("b", 1, "two"), ("c", 6, "one")], [NEW, NEW, LATE]),
        ([("a", 5, "one"), ("b", 4, "")], [NEW, LATE]),
        ([("a", 5, ""), ("b", None, ""), ("c", 4, "")], [NEW, NEW, LATE]),
    ],
)
def test_message_is_stored_exactly_where_its_frame_counts(store, messages, expected):
    """Those of one batch, and repeated in another one."""
    session = f"s-{messages}"[:128]
    batch = [message(name, session=session, seq=seq, epoch=epoch) for name, seq, epoch in messages]
    assert write(store, *batch) == expected
    assert write(store, *batch) == [LATE if each == LATE else KNOWN for each in expected]
    kept = [json.loads(entry.body)["id"] for entry in store.messages_since(session, START)]
    assert kept == [name for (name, _, _), each in zip(messages, expected, strict=True) if each == NEW]


def test_repeat_of_counted_message_is_not_counted(store):
    write(store, message("m1"))
    write(store, message("a1", "agent"))
    assert write(store, message("m1")) == [("duplicate", DROPPED)]
    assert awaited(store) == ""
    write(store, message("m2"))
    assert write(store, message("a1", "agent")) == [("duplicate", DROPPED)]
    assert write(store, message("a1", "agent", seq=7)) == [("duplicate", DROPPED)]
    assert awaited(store) == "agent"


def test_repeat_in_one_batch_is_not_counted(store):
    """Messages of both sides in one batch."""
    found = write(store, message("m1"), message("a1", "agent"), message("m1"), message("m1", session="s2"))
    assert found == [NEW, NEW, KNOWN, NEW]
    assert awaited(store) == ""


def test_repeat_of_counted_message_does_not_reopen_session(store):
    write(store, message("m1"))
    store.note_activity([Frame("s1", "ann", sender="agent", kind="close")])
    assert write(store, message("m1")) == [("duplicate", DROPPED)]
    assert stats.session_snapshot(store, "s1").state == "closed"
    assert write(store, message("m2")) == [("stored", COUNTED)]
    assert write(store, message("m1")) == [("duplicate", DROPPED)]


def test_repeat_of_counted_message_stores_lost_presence(store, monkeypatch):
    def fail(*_, **__):
        raise StoreUnavailable("killed in between")

    with monkeypatch.context() as broken:
        broken.setattr(store, "store_presence", fail)
        with pytest.raises(StoreUnavailable):
            write_frames(store, [message("m1")])
    assert write(store, message("m1")) == [("duplicate", DROPPED)]
    assert store.last_frames(["ann"]) != [None]
