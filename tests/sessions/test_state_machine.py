"""Frames, time, watchers that die and servers that forget, in any order, against a plain model."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from datetime import timedelta
from typing import Any

import pytest
from django.conf import settings as django_settings
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    rule,
    run_state_machine_as_test,
)

from sessions.frames import Frame
from sessions.policy import Policy, PolicySet
from sessions.store import stats
from sessions.store.sessions import COUNTED, DROPPED, IDLE, ClaimedSilence, Store
from tests.sessions.conftest import ALWAYS
from tests.sessions.stopped_clock import StoppedClockServer

SESSIONS = ("s1", "s2")
WATCHERS = ("one", "two")
TICK = 1_000_000
# Time passes in whole seconds and nothing falls due on one.
THRESHOLD, LEASE, TYPING = 60.3, 29.7, 120.0
PLANS = {
    "one": Policy(timedelta(seconds=THRESHOLD)),
    "short": Policy(timedelta(seconds=10.3)),
    "ladder": Policy(timedelta(seconds=THRESHOLD), max_nudges=3, growth=2),
}
HARD = ("tool", "transfer", "queue")
# Often what is often: a machine that closes and pauses most of the time never sees a silence.
USER_FRAMES = st.sampled_from(["message", "message", "typing", "read", "ping", "ping", "ping", "close"])
AGENT_FRAMES = st.sampled_from(["message"] * 4 + ["typing", "tool", "transfer", "queue", "resume", "ping", "close"])
SEQS = st.none() | st.none() | st.integers(0, 9)
RARELY = st.integers(0, 7).map(lambda number: number == 0)


@dataclass
class Chat:
    """A session as one would write it down by hand. Instants are seconds."""

    arming: int = 0  #: counted up where the store takes a new instant
    deadline: float | None = None
    nudges: int = 0
    stands: int | None = None  #: the arming of the silence that was handed in and not broken
    pause: str = ""
    pause_ends: float = 0.0
    seqs: dict[str, int] = field(default_factory=dict)
    closed: bool = False
    in_flight_until: float | None = None
    claimed: bool = False  #: and not confirmed; a ping does not end that
    written: bool = False  #: by the user, so that there is a silence to wait for
    guided: set[int] = field(default_factory=set)  #: armings into which messages went since the user's last word
    reserved: set[int] = field(default_factory=set)  #: those into which one may be on its way
    begun: bool = False

    def pause_by(self, sender: str, kind: str, now: float) -> None:
        if sender == "agent":
            if kind in HARD:
                self.pause = kind
            elif kind in ("message", "resume"):
                self.pause = ""
            elif kind == "typing" and self.pause not in HARD:
                self.pause, self.pause_ends = "typing", now + TYPING
        if self.pause == "typing" and self.pause_ends <= now:
            self.pause = ""

    def start_timer(self, policy: Policy, now: float) -> None:
        self.arming += 1
        self.in_flight_until = None
        self.claimed = False
        self.deadline = None
        if self.written and self.pause not in HARD and self.nudges < policy.max_nudges:
            begins = self.pause_ends if self.pause else now
            self.deadline = begins + policy.threshold.total_seconds() * policy.growth**self.nudges

    def apply_frame(self, frame: Frame, policy: Policy, now: float) -> int:
        sender, kind, seq = frame.sender, frame.kind, frame.seq
        if seq is not None and seq <= self.seqs.get(sender, -1):
            return DROPPED
        seqs = self.seqs if seq is None else {**self.seqs, sender: seq}
        if kind == "close":
            self.__dict__.update(vars(Chat(arming=self.arming + 1, seqs=seqs, closed=True, begun=True)))
            return COUNTED
        # Of no consequence: a ping of the agent, any ping to a closed chat, any word of the agent into one.
        if [kind == "ping", sender == "agent", self.closed].count(True) > 1:
            return IDLE
        self.seqs, self.closed, self.begun = seqs, False, True
        if kind == "ping" and self.claimed:
            return COUNTED
        if sender == "user" and (kind == "message" or frame.spoken):
            self.written = True
        if kind != "ping":
            self.stands = None
            if sender == "user":
                self.guided, self.reserved = set(), set()
            self.nudges = len(self.guided | self.reserved)
        self.pause_by(sender, kind, now)
        self.start_timer(policy, now)
        return COUNTED

    def holds(self, arming: int) -> bool:
        return arming in (self.arming, self.stands)

    def confirm(self, policy: Policy, now: float) -> None:
        self.nudges += 1
        self.stands = self.arming
        self.in_flight_until = None
        self.claimed = False
        self.deadline = None
        if self.nudges < policy.max_nudges:
            self.arming += 1
            self.deadline = now + policy.threshold.total_seconds() * policy.growth**self.nudges

    def is_due(self, now: float) -> bool:
        if self.in_flight_until is not None:
            return self.in_flight_until <= now
        return self.deadline is not None and self.deadline <= now


class Machine(RuleBasedStateMachine):
    server: StoppedClockServer

    @initialize(plan=st.sampled_from(sorted(PLANS)))
    def begin(self, plan: str) -> None:
        self.server.client.flushall()
        self.now = 1_900_000_000  # s, of a clock that stands still between rules
        self.plan = PLANS[plan]
        self.store = Store(self.server, lambda: PolicySet({"default": self.plan}))
        self.store.push(self.store.policies())
        self.chats = {each: Chat() for each in SESSIONS}
        self.held: dict[str, list[tuple[ClaimedSilence, int]]] = {each: [] for each in WATCHERS}
        self.handed_in: list[tuple[ClaimedSilence, int]] = []  #: the last that were
        self.marking: list[tuple[ClaimedSilence, int]] = []  #: between the last look and what the ledger makes of them
        self.names: dict[str, dict[int, int]] = {each: {} for each in SESSIONS}  #: by arming, the instant

    def _at_now(self) -> Store:
        self.store.clock_offset = self.now * TICK
        return self.store

    # --- rules ----------------------------------------------------------------------------------------------------

    @rule(session=st.sampled_from(SESSIONS), kind=USER_FRAMES, seq=SEQS)
    def the_user(self, session: str, kind: str, seq: int | None) -> None:
        self._frame(session, "user", kind, seq)

    @rule(session=st.sampled_from(SESSIONS), kind=AGENT_FRAMES, seq=SEQS)
    def the_agent(self, session: str, kind: str, seq: int | None) -> None:
        self._frame(session, "agent", kind, seq)

    @rule(session=st.sampled_from(SESSIONS), by=st.sampled_from(("user", "agent")), kind=AGENT_FRAMES, seq=SEQS)
    def agent_frame_after_the_close(self, session: str, by: str, kind: str, seq: int | None) -> None:
        self._frame(session, by, "close", None)
        self._frame(session, "agent", kind, seq)

    @rule(session=st.sampled_from(SESSIONS), watcher=st.sampled_from(WATCHERS), kind=USER_FRAMES)
    def the_user_comes_back_at_the_last_moment(self, session: str, watcher: str, kind: str) -> None:
        self._frame(session, "user", "message", None)
        self.time_passes(61)
        self.a_watcher_claims(watcher)
        self._frame(session, "user", kind, None)

    @rule(session=st.sampled_from(SESSIONS), watcher=st.sampled_from(WATCHERS))
    def the_user_is_silent(self, session: str, watcher: str) -> None:
        self._frame(session, "user", "ping", None)
        self.time_passes(61)
        self.a_watcher_claims(watcher)

    @rule(session=st.sampled_from(SESSIONS))
    def a_page_of_a_user_who_has_written_pings(self, session: str) -> None:
        self._frame(session, "user", "ping", None, spoken=True)

    @rule(session=st.sampled_from(SESSIONS), watcher=st.sampled_from(WATCHERS))
    def a_ping_falls_between_send_and_confirm(self, session: str, watcher: str) -> None:
        self._frame(session, "user", "message", None)
        self.time_passes(61)
        self.a_watcher_claims(watcher)
        self.messages_go_out()
        self._frame(session, "user", "ping", None)
        self.confirms(watcher)

    @rule(session=st.sampled_from(SESSIONS), watcher=st.sampled_from(WATCHERS), kind=AGENT_FRAMES)
    def the_agent_is_faster_than_the_message(self, session: str, watcher: str, kind: str) -> None:
        self._frame(session, "user", "message", None)
        self.time_passes(61)
        self.a_watcher_claims(watcher)
        self.confirms(watcher)
        self._frame(session, "agent", kind, None)
        self.messages_go_out()

    def _frame(self, session: str, sender: str, kind: str, seq: int | None, *, spoken: bool = False) -> None:
        frame = Frame(session, "ann", sender=sender, kind=kind, seq=seq, spoken=spoken)
        (noted,) = self._at_now().note_activity([frame])
        chat = self.chats[session]
        assert noted.outcome == chat.apply_frame(frame, self.plan, self.now)
        if chat.deadline is None:
            assert noted.deadline_ms == 0
        elif noted.outcome == COUNTED:
            assert noted.deadline_ms / 1000 == pytest.approx(chat.deadline, abs=0.001)

    @rule(seconds=st.sampled_from((1, 5, 12, 31, 61, 125, 250)))
    def time_passes(self, seconds: int) -> None:
        self.now += seconds

    @rule(watcher=st.sampled_from(WATCHERS))
    def a_watcher_claims(self, watcher: str) -> None:
        claims = self._at_now().claim_silent(100, timedelta(seconds=LEASE))
        due = {session: chat for session, chat in self.chats.items() if chat.is_due(self.now)}
        assert {each.session_id for each in claims.silences} == set(due)
        for claim in claims.silences:
            chat = due[claim.session_id]
            chat.in_flight_until = self.now + LEASE
            chat.claimed = True
            assert claim.nudge == chat.nudges + 1
            assert claim.deadline_ms / 1000 == pytest.approx(chat.deadline, abs=0.001)
            self._check_name(claim, chat.arming)
            self.held[watcher].append((claim, chat.arming))

    def _check_name(self, claim: ClaimedSilence, arming: int) -> None:
        """One name for each silence however often it is claimed, and later names for later ones: the core stores what
        has the same name once, so each silence is handed in exactly once."""
        names = self.names[claim.session_id]
        assert names.setdefault(arming, claim.armed_at) == claim.armed_at
        assert list(names) == sorted(names)
        assert list(names.values()) == sorted(set(names.values()))

    @rule(watcher=st.sampled_from(WATCHERS))
    def confirms(self, watcher: str) -> None:
        held, self.held[watcher] = self.held[watcher], []
        assert self._at_now().confirm([claim for claim, _ in held]) == len(self._still_ours(held))
        for chat in self._still_ours(held):
            chat.confirm(self.plan, self.now)
        # The answer was lost: it is done again and does nothing.
        assert self._at_now().confirm([claim for claim, _ in held]) == 0
        self.handed_in = [*self.handed_in, *held][-10:]

    @rule(watcher=st.sampled_from(WATCHERS))
    def watcher_releases(self, watcher: str) -> None:
        held, self.held[watcher] = self.held[watcher], []
        assert self._at_now().release([claim for claim, _ in held]) == len(self._still_ours(held))
        for chat in self._still_ours(held):
            chat.in_flight_until = None

    def _still_ours(self, held: list[tuple[ClaimedSilence, int]]) -> list[Chat]:
        """A watcher that slept over its lease may hold what another one has by now: the same silence, so either may
        confirm it."""
        found: dict[str, Chat] = {}
        for claim, arming in held:
            chat = self.chats[claim.session_id]
            if chat.arming == arming and chat.in_flight_until is not None:
                found[claim.session_id] = chat
        return list(found.values())

    @rule(watcher=st.sampled_from(WATCHERS))
    def a_watcher_dies(self, watcher: str) -> None:
        self.held[watcher] = []

    @rule()
    def scripts_are_flushed(self) -> None:
        self.server.client.script_flush()

    @rule(happens=RARELY)
    def redis_is_flushed(self, happens: bool) -> None:
        if not happens:
            return
        self.server.client.flushall()
        # A name of a forgotten session comes back at no later instant.
        self.now += 1
        self.chats = {session: Chat(arming=chat.arming + 1) for session, chat in self.chats.items()}

    @rule(plan=st.sampled_from(sorted(PLANS)))
    def operator_edits_the_policy(self, plan: str) -> None:
        self.plan = PLANS[plan]
        self.store.push(self.store.policies())

    @rule()
    def worker_confirms_waiting_messages(self) -> None:
        self._look(going_out=False)

    @rule()
    def messages_go_out(self) -> None:
        self._note(self._look(going_out=True), sent=True)

    @rule()
    def the_ledger_stops_messages(self) -> None:
        self._note(self._look(going_out=True), sent=False)

    @rule()
    def messages_are_about_to_go_out(self) -> None:
        self.marking = [*self.marking, *self._look(going_out=True)][-10:]

    @rule(sent=st.booleans())
    def they_do_or_are_stopped(self, sent: bool) -> None:
        marking, self.marking = self.marking, []
        self._note(marking, sent=sent)

    @rule()
    def a_worker_dies(self) -> None:
        self.marking = []

    def _look(self, *, going_out: bool) -> list[tuple[ClaimedSilence, int]]:
        """Returns those whose messages go out."""
        held = [each for claims in (*self.held.values(), self.handed_in) for each in claims]
        asked = [(claim.session_id, claim.armed_at) for claim, _ in held]
        until = ALWAYS if going_out else None
        _, stand = self._at_now().still_silent(asked, send_until=[until] * len(asked))
        for (claim, arming), stands in zip(held, stand, strict=True):
            chat = self.chats[claim.session_id]
            assert bool(stands) == (not chat.begun or chat.holds(arming))
            if going_out and stands and chat.begun and arming not in chat.guided:
                chat.reserved.add(arming)
        return [each for each, stands in zip(held, stand, strict=True) if stands]

    def _note(self, messages: list[tuple[ClaimedSilence, int]], *, sent: bool) -> None:
        asked = [(claim.session_id, claim.armed_at) for claim, _ in messages]
        self._at_now().note_sending(asked, [sent] * len(asked))
        for claim, arming in messages:
            chat = self.chats[claim.session_id]
            if sent and chat.begun and (chat.holds(arming) or arming in chat.reserved):
                chat.guided.add(arming)
            chat.reserved.discard(arming)

    # --- what always holds ----------------------------------------------------------------------------------------

    @invariant()
    def nothing_is_in_two_places(self) -> None:
        if not hasattr(self, "store"):
            return
        armed = sum(chat.deadline is not None and chat.in_flight_until is None for chat in self.chats.values())
        flying = sum(chat.in_flight_until is not None for chat in self.chats.values())
        shards = self.store.shards()
        assert (sum(each.armed for each in shards), sum(each.in_flight for each in shards)) == (armed, flying)
        for session, chat in self.chats.items():
            found = stats.session_snapshot(self.store, session)
            assert found.nudges == len(chat.guided)
            # No more messages than the policy with most of them allows, until the user says a word.
            assert len(chat.guided | chat.reserved) <= 3
        counts = [each for shard in shards for each in shard.counts.items()]
        paused = sum(chat.begun and not chat.closed and chat.pause in HARD for chat in self.chats.values())
        assert sum(each.paused for each in shards) == paused
        assert sum(count for name, count in counts if name.startswith("a:")) == armed + flying
        assert sum(count for name, count in counts if name.startswith("p:")) == paused

    def teardown(self) -> None:
        """In the end one watcher lives: every silence that nobody broke is handed in, and then there are no more."""
        if not hasattr(self, "store"):
            return
        self.a_watcher_dies("two")
        for _ in range(12):
            self.now += 1000
            due = {session: replace(chat) for session, chat in self.chats.items() if chat.is_due(self.now)}
            self.held["one"] = []
            self.a_watcher_claims("one")
            assert {claim.session_id for claim, _ in self.held["one"]} == set(due)
            self.confirms("one")
        assert all(chat.deadline is None for chat in self.chats.values())


@pytest.fixture
def machine(valkey: Any) -> Iterator[type[Machine]]:
    server = StoppedClockServer(django_settings.REDIS_URL)
    yield type("Machine", (Machine,), {"server": server})
    server.client.close()


def test_store_behaves_like_model(machine: type[Machine]) -> None:
    run_state_machine_as_test(
        machine,
        settings=settings(
            max_examples=150, stateful_step_count=50, suppress_health_check=list(HealthCheck),
        ),
    )  # type: ignore[no-untyped-call]  # fmt: skip
