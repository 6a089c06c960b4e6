"""Which messages of one batch the inbox gets as they are, and which as overtaken; and which repeats are counted."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest

from sessions.frames import Frame
from sessions.policy import CUSTOMER, Policy
from sessions.store import stats
from sessions.store.client import StoreUnavailable
from sessions.store.inbox import OVERTAKEN, Inbox, Post
from sessions.store.sessions import COUNTED, DROPPED
from sessions.websocket.connection import FrameRequest, FrameResult, FrameWriter, build_posts
from tests.sessions.conftest import Chats
from tests.support.tables import each_row


@pytest.mark.parametrize(
    ("messages", "overtaken"),
    [
        ([("a", 5, ""), ("b", 6, "")], []),
        ([("a", 5, ""), ("b", 4, "")], ["b"]),
        ([("a", 5, ""), ("b", 5, "")], ["b"]),
        ([("a", 5, ""), ("a", 5, "")], []),
        ([("a", 5, "one"), ("b", 1, "two")], []),
        ([("a", 5, "one"), ("b", 1, "two"), ("c", 6, "one")], ["c"]),
        ([("a", 5, "one"), ("b", 4, "")], ["b"]),
        ([("a", 5, ""), ("b", None, ""), ("c", 4, "")], ["c"]),
    ],
    ids=[
        "in order", "late", "another with the same seq", "repeated", "new epoch", "late from the epoch before",
        "late without an epoch", "one without a seq changes nothing",
    ],
)  # fmt: skip
def test_build_posts_marks_overtaken_messages(
    messages: list[tuple[str, int | None, str]], overtaken: list[str]
) -> None:
    slips = [
        FrameRequest(
            Frame("s1", "ann", seq=seq, epoch=epoch), Post("s1", key, "user", "hi", key=key, seq=seq, epoch=epoch)
        )
        for key, seq, epoch in messages
    ]
    posts = build_posts(slips)
    assert list(posts) == list(range(len(messages)))
    assert [post.key for post in posts.values() if post.seq == OVERTAKEN] == overtaken


def test_build_posts_separates_sides_and_sessions() -> None:
    slips = [
        FrameRequest(Frame(session, "ann", sender=sender, seq=seq), Post(session, "m", sender, "hi", key="m", seq=seq))
        for session, sender, seq in (("s1", "user", 5), ("s1", "agent", 4), ("s2", "user", 4))
    ]
    assert [post.seq for post in build_posts(slips).values()] == [5, 4, 4]


@pytest.fixture
def writer(chats: Chats) -> FrameWriter:
    chats.policies(default=Policy(timedelta(seconds=60), after=CUSTOMER))
    return FrameWriter(chats.store, Inbox(chats.store.server))


def message(name: str, sender: str = "user", *, session: str = "s1", seq: int | None = None) -> FrameRequest:
    post = Post(session, name, sender, "hi", key=f"{sender}:{name}", seq=seq)
    return FrameRequest(Frame(session, "ann", sender=sender, seq=seq), post)


def write(writer: FrameWriter, *requests: FrameRequest) -> list[tuple[str, int]]:
    """Return what became of the message and of the frame."""
    found = writer.write_batch(requests)
    assert all(isinstance(each, FrameResult) and each.posted for each in found)
    return [(each.posted.outcome, each.noted.outcome) for each in found]  # type: ignore[union-attr]


def awaited(writer: FrameWriter) -> str:
    return stats.session_snapshot(writer.store, "s1").awaited


def test_repeat_of_counted_message_is_not_counted(writer: FrameWriter) -> None:
    write(writer, message("m1"))
    write(writer, message("a1", "agent"))
    assert write(writer, message("m1")) == [("duplicate", DROPPED)]
    assert awaited(writer) == ""
    write(writer, message("m2"))
    assert write(writer, message("a1", "agent")) == [("duplicate", DROPPED)]
    assert write(writer, message("a1", "agent", seq=7)) == [("duplicate", DROPPED)]
    assert awaited(writer) == "agent"


def test_repeat_in_one_batch_is_not_counted(writer: FrameWriter) -> None:
    found = write(writer, message("m1"), message("a1", "agent"), message("m1"), message("m1", session="s2"))
    assert found == [("stored", COUNTED), ("stored", COUNTED), ("duplicate", DROPPED), ("stored", COUNTED)]
    assert awaited(writer) == ""


def test_repeat_of_counted_message_does_not_reopen_session(writer: FrameWriter) -> None:
    write(writer, message("m1"))
    writer.store.note_activity([Frame("s1", "ann", sender="agent", kind="close")])
    assert write(writer, message("m1")) == [("duplicate", DROPPED)]
    assert stats.session_snapshot(writer.store, "s1").state == "closed"
    assert write(writer, message("m2")) == [("stored", COUNTED)]
    assert write(writer, message("m1")) == [("duplicate", DROPPED)]


@each_row("sender", ["user", "agent"])
def test_repeat_of_uncounted_message_is_counted(
    writer: FrameWriter, monkeypatch: pytest.MonkeyPatch, sender: str
) -> None:
    """Other frames of the side, counted in between, do not stand for the message."""
    if sender == "agent":
        write(writer, message("m1"))

    def fail(*_: Any, **__: Any) -> None:
        raise StoreUnavailable("killed in between")

    with monkeypatch.context() as broken:
        broken.setattr(writer.store, "note_activity", fail)
        with pytest.raises(StoreUnavailable):
            writer.write_batch([message("x1", sender)])
    writer.store.note_activity([Frame("s1", "ann", sender=sender, kind="typing")])
    assert write(writer, message("x1", sender)) == [("duplicate", COUNTED)]
    assert awaited(writer) == ("agent" if sender == "user" else "")
    assert write(writer, message("x1", sender)) == [("duplicate", DROPPED)]


def test_repeat_of_counted_message_stores_lost_presence(writer: FrameWriter, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise StoreUnavailable("killed in between")

    with monkeypatch.context() as broken:
        broken.setattr(writer.store, "store_presence", fail)
        with pytest.raises(StoreUnavailable):
            writer.write_batch([message("m1")])
    assert write(writer, message("m1")) == [("duplicate", DROPPED)]
    assert writer.store.last_frames(["ann"]) != [None]
