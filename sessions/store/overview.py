"""The live chats at a glance, for a page and for `/metrics`. The work is the same however many chats there are."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from sessions.store import stats
from sessions.store.sessions import Store
from sessions.store.stats import WatcherState


@dataclass(frozen=True, slots=True)
class TagCount:
    """Chats of a tag. Those of tags without a policy of their own are counted under `default`, which holds for them."""

    tag: str
    armed: int
    paused: int


@dataclass(frozen=True, slots=True)
class Overview:
    """Live is a chat whose silence is waited for (armed), or that our own side keeps waiting (paused). One that has
    been silent, and has had its last message, is not live until somebody speaks."""

    tags: list[TagCount]
    armed: int
    paused: int
    in_flight: int  #: silences that are claimed and not yet handed in
    lag_ms: int  #: how far the oldest due deadline that nobody has claimed is behind the server's clock
    a_second: float  #: silences, over the last minute
    watchers: list[WatcherState]

    @property
    def live(self) -> int:
        return self.armed + self.paused


def look(store: Store) -> Overview:
    """Raises `StoreAway`."""
    shards, working = store.shards(), stats.watchers(store)
    counts: Counter[str] = Counter()
    for shard in shards:
        counts.update(shard.counts)
    tags = {name.partition(":")[2] for name in counts}
    found = [TagCount(tag, counts[f"a:{tag}"], counts[f"p:{tag}"]) for tag in tags]
    return Overview(
        tags=sorted(found, key=lambda each: (-each.armed - each.paused, each.tag)),
        armed=sum(each.armed + each.in_flight for each in shards),
        paused=sum(each.paused for each in shards),
        in_flight=sum(each.in_flight for each in shards),
        lag_ms=max(
            (each.now_ms - each.first_due_ms for each in shards if 0 <= each.first_due_ms < each.now_ms), default=0
        ),
        a_second=sum(each.last_minute for each in working) / 60,
        watchers=working,
    )
