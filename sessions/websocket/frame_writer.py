"""Write the frames of all connections and requests of this process to the store in small batches."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple
from weakref import WeakKeyDictionary

from scheduling import metrics
from scheduling.batching import MicroBatcher
from sessions.frames import Frame
from sessions.store.client import StoreUnavailable, shard_of
from sessions.store.inbox import OVERTAKEN, Inbox, Post, Posted
from sessions.store.sessions import DROPPED, UNAVAILABLE, FrameEffect, Store

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
    other order it would be counted and then dropped as a repeat. The repeat of a message that was counted is dropped:
    the other side may have written since. A frame of a cluster's node that is unavailable gets `StoreUnavailable` as
    its result; the others of the batch are written.
    """

    def __init__(self, store: Store, inbox: Inbox) -> None:
        self.store = store
        self.inbox = inbox

    def write_batch(self, slips: Sequence[FrameRequest]) -> list[FrameResult | Exception]:
        posts = build_posts(slips)
        answers: Sequence[Posted | None]
        try:
            answers = self.inbox.put_available(list(posts.values()))
        except StoreUnavailable:
            if len(posts) == len(slips):
                raise
            answers = [None] * len(posts)  # frames of other nodes may follow
        posted = dict(zip(posts, answers, strict=True))
        lost = {shard_of(slips[number].frame.session_id) for number, each in posted.items() if each is None}
        numbers = [
            number for number, slip in enumerate(slips) if not lost or shard_of(slip.frame.session_id) not in lost
        ]
        stored, repeated = find_repeats(numbers, posts, posted)
        frames = [slips[number].frame for number in numbers]
        noted = self.store.note_activity(frames, stored=stored, repeated=repeated, partly=True)
        stale = sum(
            each.outcome == DROPPED and frame.seq is not None for frame, each in zip(frames, noted, strict=True)
        )
        if stale:
            metrics.count_dropped_frames(STALE_SEQ, stale)
        written = [at for at, each in zip(numbers, noted, strict=True) if each.outcome != UNAVAILABLE]
        asked = [number for number in written if slips[number].needs_cursor]
        last = dict(zip(asked, self.inbox.last_cursors([slips[at].frame.session_id for at in asked]), strict=True))
        results: list[FrameResult | Exception] = [StoreUnavailable("the node does not answer")] * len(slips)
        for number, each in zip(numbers, noted, strict=True):
            if each.outcome != UNAVAILABLE and last.get(number) != "":
                results[number] = FrameResult(each, posted.get(number), last.get(number, ""))
        return results


def build_posts(slips: Sequence[FrameRequest]) -> dict[int, Post]:
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


def find_repeats(
    numbers: Sequence[int], posts: Mapping[int, Post], posted: Mapping[int, Posted | None]
) -> tuple[set[int], set[int]]:
    """Return places in `numbers`: of messages in the inbox whose frames count, and of repeats of counted messages."""
    stored: set[int] = set()
    repeated: set[int] = set()
    names: set[tuple[str, str]] = set()
    for place, number in enumerate(numbers) if posted else ():
        each = posted.get(number)
        if each and each.outcome in ("stored", "duplicate"):
            name = posts[number].session_id, posts[number].key
            # An earlier frame of the batch is counted with it.
            is_repeat = each.outcome == "duplicate" and (each.counted or name in names)
            (repeated if is_repeat else stored).add(place)
            names.add(name)
    return stored, repeated


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
