"""Write the frames of all connections and requests of this process to the store in small batches."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple
from weakref import WeakKeyDictionary

from scheduling import metrics
from scheduling.batching import MicroBatcher
from sessions.frames import Frame
from sessions.store.inbox import OVERTAKEN, Inbox, Post, Posted
from sessions.store.sessions import DROPPED, FrameEffect, Store

BATCH_WINDOW = 0.02  #: seconds
STALE_SEQ = "stale_seq"  #: reason of a dropped frame: its seq is not above the last of its side


@dataclass(frozen=True, slots=True)
class FrameRequest:
    """A frame with its message, if it carries one. `look` requests the last cursor of the inbox."""

    frame: Frame
    post: Post | None = None
    needs_cursor: bool = False


class FrameResult(NamedTuple):
    noted: FrameEffect
    posted: Posted | None
    last_cursor: str  #: of the inbox; "" if not requested


class FrameWriter:
    """Write frames and messages in a thread.

    Messages are written before frames. If the store fails in between, the message is stored and not counted. The
    client receives an error and repeats the message. The repeat is detected by id or seq, and is counted. In the
    other order it would be counted and then dropped as a repeat.
    """

    def __init__(self, store: Store, inbox: Inbox) -> None:
        self.store = store
        self.inbox = inbox

    def write_batch(self, slips: Sequence[FrameRequest]) -> list[FrameResult]:
        posts = _posts_by_position(slips)
        posted = dict(zip(posts, self.inbox.put(list(posts.values())), strict=True))
        noted = self.store.note_activity([slip.frame for slip in slips])
        if stale := sum(each.outcome == DROPPED for each in noted):
            metrics.count_dropped_frames(STALE_SEQ, stale)
        last = iter(self.inbox.last_cursors([slip.frame.session_id for slip in slips if slip.needs_cursor]))
        return [
            FrameResult(each, posted.get(number), next(last) if slip.needs_cursor else "")
            for number, (slip, each) in enumerate(zip(slips, noted, strict=True))
        ]


def _posts_by_position(slips: Sequence[FrameRequest]) -> dict[int, Post]:
    """Return the messages by position in the batch.

    A message is marked `OVERTAKEN` if a higher seq or a newer epoch precedes it in the batch. The inbox stores only
    counted messages. The inbox detects by key whether the message is already stored.
    """
    highest: dict[tuple[str, str], tuple[str, int, str]] = {}
    former: set[tuple[str, str, str]] = set()
    posts = {}
    for number, slip in enumerate(slips):
        if (post := slip.post) is None:
            continue
        side, seq = (slip.frame.session_id, slip.frame.sender), slip.frame.seq
        if seq is not None:
            epoch, last, key = highest.get(side, ("", -1, ""))
            own = slip.frame.epoch or epoch
            if (*side, own) in former or (own == epoch and (seq < last or (seq == last and post.key != key))):
                post = replace(post, seq=OVERTAKEN, epoch="")
            else:
                if own != epoch and last >= 0:
                    former.add((*side, epoch))
                highest[side] = own, seq, post.key
        posts[number] = post
    return posts


FrameBatcher = MicroBatcher[FrameRequest, FrameResult]

_batchers: WeakKeyDictionary[asyncio.AbstractEventLoop, FrameBatcher] = WeakKeyDictionary()


def frame_writer() -> FrameBatcher:
    """Return the frame writer of the running loop."""
    from sessions.store import inbox, sessions

    loop = asyncio.get_running_loop()
    if loop not in _batchers:
        _batchers[loop] = MicroBatcher(
            FrameWriter(sessions.live_store(), inbox.live_inbox()).write_batch,
            moment=BATCH_WINDOW,
            name="sessions-desk",
        )
    return _batchers[loop]
