"""Which messages of one batch the inbox gets as they are, and which as overtaken."""

from __future__ import annotations

import pytest

from sessions.frames import Frame
from sessions.store.inbox import OVERTAKEN, Post
from sessions.websocket.frame_writer import FrameRequest, _posts_by_position


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
def test_posts_by_position_marks_overtaken_messages(
    messages: list[tuple[str, int | None, str]], overtaken: list[str]
) -> None:
    slips = [
        FrameRequest(
            Frame("s1", "ann", seq=seq, epoch=epoch), Post("s1", key, "user", "hi", key=key, seq=seq, epoch=epoch)
        )
        for key, seq, epoch in messages
    ]
    posts = _posts_by_position(slips)
    assert list(posts) == list(range(len(messages)))
    assert [post.key for post in posts.values() if post.seq == OVERTAKEN] == overtaken


def test_posts_by_position_separates_sides_and_sessions() -> None:
    slips = [
        FrameRequest(Frame(session, "ann", sender=sender, seq=seq), Post(session, "m", sender, "hi", key="m", seq=seq))
        for session, sender, seq in (("s1", "user", 5), ("s1", "agent", 4), ("s2", "user", 4))
    ]
    assert [post.seq for post in _posts_by_position(slips).values()] == [5, 4, 4]
