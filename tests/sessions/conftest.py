"""A store on the real server with a clock that tests may push, and people in it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from django.test import override_settings

from sessions.frames import Frame
from sessions.policy import Policy, PolicySet
from sessions.store import client
from sessions.store.client import ClusterClient, Server, instant_of_ms
from sessions.store.sessions import ClaimedSilence, Store
from tests.sessions.redis_cluster import ClusterUnderTest, redis_cluster

LEASE = timedelta(seconds=30)
ALWAYS = datetime.max.replace(tzinfo=UTC)


class Chats:
    """Chats in a store. `pass_time` moves the clock of the store's scripts."""

    def __init__(self, server: Server) -> None:
        self.plan = PolicySet({})
        self.store = Store(server, lambda: self.plan)
        self.policies(default=Policy(timedelta(seconds=60)))

    def policies(self, *, campaigns: Sequence[Any] = (), **tags: Policy) -> None:
        self.plan = PolicySet({"default": Policy(timedelta(seconds=60)), **tags}, tuple(campaigns))
        self.store.push(self.plan)

    def pass_time(self, seconds: float) -> None:
        self.store.clock_offset += round(seconds * 1_000_000)

    @property
    def now(self) -> datetime:
        seconds, micros = self.store.server.client.time()
        return instant_of_ms(seconds * 1000 + (micros + self.store.clock_offset) // 1000)

    def user(self, session: str = "s1", kind: str = "message", **more: Any) -> Any:
        more.setdefault("user_id", "ann")
        return self.store.note_activity([Frame(session, sender="user", kind=kind, **more)])[0]

    def agent(self, session: str = "s1", kind: str = "message", **more: Any) -> Any:
        more.setdefault("user_id", "ann")
        return self.store.note_activity([Frame(session, sender="agent", kind=kind, **more)])[0]

    def claim(self, limit: int = 100, lease: timedelta = LEASE) -> list[ClaimedSilence]:
        return self.store.claim_silent(limit, lease).silences

    def claimed_silence(self, session: str = "s1", **more: Any) -> ClaimedSilence:
        """The user writes and then is silent for a minute."""
        self.user(session, **more)
        self.pass_time(61)
        (claim,) = self.claim()
        return claim

    def confirmed_silence(self, session: str = "s1", **more: Any) -> ClaimedSilence:
        claim = self.claimed_silence(session, **more)
        self.store.confirm([claim])
        return claim

    def silent(self, session: str = "s1") -> bool:
        """Whether the watcher would find it now, without taking it."""
        found = self.claim()
        self.store.release(found)
        return session in {each.session_id for each in found}

    def is_current(self, claim: ClaimedSilence, *, send_until: datetime | None = ALWAYS) -> bool:
        """The look right before its message goes out."""
        return bool(self.store.still_silent([(claim.session_id, claim.armed_at)], send_until=[send_until])[1][0])

    def deliver(self, claim: ClaimedSilence, *, sent: bool = True) -> None:
        """That look, and what the ledger made of the message."""
        assert self.is_current(claim)
        self.note_sending(claim, sent=sent)

    def note_sending(self, claim: ClaimedSilence, *, sent: bool = True) -> None:
        self.store.note_sending([(claim.session_id, claim.armed_at)], [sent])

    def seconds_left(self, noted: Any) -> float:
        return noted.deadline_ms / 1000 - self.now.timestamp() if noted.deadline_ms else 0.0


def count_nudges(store: Store, policy: str, days_ago: int = 0, **outcomes: int) -> None:
    """Count guide messages of a policy, as the scripts do."""
    key = client.day_keys(days_ago)[0]
    store.server.ask(lambda pipe: [pipe.hincrby(key, f"{what}:{policy}", count) for what, count in outcomes.items()])


@pytest.fixture(scope="session")
def cluster(state_folder) -> Iterator[ClusterUnderTest]:
    with redis_cluster(state_folder("cluster")) as made:
        yield made


@pytest.fixture
def empty_cluster(cluster) -> None:
    """Delete what an earlier test left: its policies would count in the next one."""
    emptied = ClusterClient(cluster.url)
    emptied.flushall()
    emptied.close()


@pytest.fixture(params=["single", pytest.param("cluster", marks=pytest.mark.processes)])
def store_url(request, valkey) -> Iterator[str]:
    """The address of an empty server that the store of the process uses. In `make processes` an empty cluster too."""
    from django.conf import settings

    if request.param == "single":
        yield settings.REDIS_URL
        return
    url = request.getfixturevalue("cluster").url
    with override_settings(AFTERTOUCH_SESSIONS_REDIS_URL=url):
        request.getfixturevalue("empty_cluster")
        yield url


@pytest.fixture
def server(valkey) -> Iterator[Server]:
    from django.conf import settings

    made = Server(settings.REDIS_URL)
    yield made
    made.client.close()


@pytest.fixture
def chats(server) -> Chats:
    return Chats(server)
