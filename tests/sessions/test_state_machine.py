"""Frames, time, watchers that die and servers that forget, in any order, against a plain model."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta
from typing import NamedTuple

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    rule,
    run_state_machine_as_test,
)

from scheduling.server_addresses import is_cluster
from sessions.frames import Frame
from sessions.policy import AGENT, ANY, CUSTOMER, Override, Policy, PolicySet
from sessions.store import client, stats
from sessions.store.client import POLICIES, SESSION, decode_text, shard_of
from sessions.store.sessions import COUNTED, DROPPED, IDLE, Store
from tests.sessions.conftest import ALWAYS
from tests.sessions.stopped_clock import StoppedClockServer

SESSIONS = ("s1", "s2")
WATCHERS = ("one", "two")
TICK = 1_000_000
# Time passes in whole seconds and nothing falls due on one.
THRESHOLD, LEASE, TYPING = 60.3, 29.7, 120.0
START = 1_900_000_000  #: s
DAY = 86_400
OPEN = ((START - DAY, START + 200), (START + 2 * DAY, START + 100 * DAY))
HOURS = [(datetime.fromtimestamp(opens, UTC), datetime.fromtimestamp(closes, UTC)) for opens, closes in OPEN]
PLANS = {
    "one": Policy(timedelta(seconds=THRESHOLD)),
    "short": Policy(timedelta(seconds=10.3)),
    "several": Policy(timedelta(seconds=THRESHOLD), max_nudges=3, growth=2),
    "agent": Policy(timedelta(seconds=THRESHOLD), after=AGENT),
    "answer": Policy(timedelta(seconds=THRESHOLD), max_nudges=3, growth=1, after=CUSTOMER),
    "grace": Policy(timedelta(seconds=THRESHOLD), grace=timedelta(seconds=15.4)),
    "hours": Policy(timedelta(seconds=THRESHOLD), grace=timedelta(seconds=15.4), max_nudges=2, hours=HOURS),
}
#: Of sessions with tags; the most specific one applies.
TAGGED = {
    "vip": Policy(timedelta(seconds=40.3), max_nudges=2),
    "new-vip": Policy(timedelta(seconds=20.3), tags=("vip", "new")),
    "help": Policy(timedelta(seconds=45.3), max_nudges=2, growth=1, after=CUSTOMER),
}
TAGS = st.sampled_from([(), (), (), ("vip",), ("new",), ("sale", "vip", "new"), ("help",), ("help", "vip")])
CAMPAIGN = st.sampled_from([30.6, 90.6])
UNKNOWN, USER_WROTE, AGENT_WROTE, WAITING = range(1, 5)
HARD = ("tool", "transfer", "queue")
# Often what is often: a machine that closes and pauses most of the time never sees a silence.
USER_FRAMES = st.sampled_from(["message", "message", "typing", "read", "ping", "ping", "ping", "close"])
AGENT_FRAMES = st.sampled_from(["message"] * 4 + ["typing", "tool", "transfer", "queue", "resume", "ping", "close"])
SEQS = st.none() | st.none() | st.integers(0, 9)
RARELY = st.integers(0, 7).map(lambda number: number == 0)


class Rules(NamedTuple):
    """The policies of a session: one waits for the customer, one for an agent."""

    guide: Policy | None
    answer: Policy | None

    def of_timer(self, writer):
        found = (self.answer if writer == WAITING else None) or self.guide or self.answer
        assert found
        return found

    def guide_after(self, writer):
        """The guide policy, if its timer runs after this writer."""
        anyone = self.guide and self.guide.after == ANY and not self.answer and writer
        return self.guide if writer == AGENT_WROTE or (anyone and writer != WAITING) else None


def deadline_of(policy, begins, nudges=0, span=None):
    left = span.total_seconds() if span else policy.threshold.total_seconds() * policy.growth**nudges
    for opens, closes in OPEN if policy.hours else ():
        begins = max(begins, opens)
        if begins + left <= closes:
            break
        if begins < closes:
            begins, left = closes, left - (closes - begins)
    return begins + left


@dataclass
class Chat:
    """A session as one would write it down by hand. Instants are seconds."""

    arming: int = 0  #: counted up where the store takes a new instant
    deadline: float | None = None
    nudges: int = 0
    stands: int | None = None  #: the arming of the recorded, unbroken silence
    pause: str = ""
    pause_ends: float = 0.0
    seqs: dict[str, int] = field(default_factory=dict)
    closed: bool = False
    in_flight_until: float | None = None
    claimed: bool = False  #: and not confirmed; a ping does not end that
    writer: int = 0  #: who wrote last, once the user has written, so that there is a silence to wait for
    paused: bool = False
    tags: tuple[str, ...] = ()
    begun_at: float = 0.0  #: of the arming
    timer_from: float = 0.0  #: later than the arming while an agent types
    graced: int = -1  #: the arming that was extended
    guided: set[int] = field(default_factory=set)  #: armings into which messages went since the user's last word
    reserved: set[int] = field(default_factory=set)  #: those into which one may be on its way
    begun: bool = False

    def pause_by(self, sender, kind, now):
        if sender == "agent":
            if kind in HARD:
                self.pause = kind
            elif kind in ("message", "resume"):
                self.pause = ""
            elif kind == "typing" and self.pause not in HARD:
                self.pause, self.pause_ends = "typing", now + TYPING
        if self.pause == "typing" and self.pause_ends <= now:
            self.pause = ""

    def start_timer(self, rules, now):
        self.arming += 1
        self.begun_at = now
        self.in_flight_until = None
        self.claimed = False
        self.deadline = None
        waits = rules.answer and self.writer in (USER_WROTE, WAITING)
        self.paused = self.pause in HARD and bool(rules.guide) and not waits
        begins = self.pause_ends if self.pause == "typing" else now
        if waits and rules.answer:
            self.writer, self.nudges, self.timer_from = WAITING, 0, now
            self.deadline = deadline_of(rules.answer, now)
        guide = rules.guide_after(self.writer)
        if guide and not self.paused and self.nudges < guide.max_nudges:
            self.timer_from = begins
            self.deadline = deadline_of(guide, begins, self.nudges)

    def apply_frame(self, frame, rules, now):
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
        self.tags = tuple(frame.tags) or self.tags
        spoke = kind == "message" and sender == "agent"
        if self.writer == WAITING and rules.answer and not spoke:
            self.pause_by(sender, kind, now)  # the wait for the agent goes on
            self.paused = False
            return COUNTED
        switched = self.writer == WAITING and kind != "message"
        if (kind == "message" and sender == "user") or switched:
            self.writer = USER_WROTE
        elif spoke and self.writer:
            self.writer = AGENT_WROTE
        elif sender == "user" and frame.spoken and not self.writer:
            self.writer = UNKNOWN
        if kind != "ping" or switched:
            self.stands = None
            if sender == "user" and kind != "ping":
                self.guided, self.reserved = set(), set()
            self.nudges = len(self.guided | self.reserved)
        self.pause_by(sender, kind, now)
        self.start_timer(rules, now)
        return COUNTED

    def holds(self, arming):
        return arming in (self.arming, self.stands)

    def confirm(self, rules, now):
        self.nudges += 1
        self.stands = self.arming
        self.begun_at = self.timer_from = now
        self.in_flight_until = None
        self.claimed = False
        self.deadline = None
        policy = rules.answer if self.writer == WAITING else rules.guide_after(self.writer)
        if policy and self.nudges < policy.max_nudges:
            self.arming += 1
            self.deadline = deadline_of(policy, now, self.nudges)

    def claim(self, rules, now):
        """Whether the silence is claimed. A grace makes it due later, once per arming."""
        if not self.is_due(now):
            return False
        policy = rules.of_timer(self.writer)
        if self.in_flight_until is None and policy.grace and self.graced != self.arming:
            self.graced, self.deadline = self.arming, deadline_of(policy, now, span=policy.grace)
            return False
        return True

    def is_due(self, now):
        if self.in_flight_until is not None:
            return self.in_flight_until <= now
        return self.deadline is not None and self.deadline <= now


class Machine(RuleBasedStateMachine):
    @initialize(plan=st.sampled_from(sorted(PLANS)))
    def begin(self, plan):
        self.server.client.flushall()
        self.now = START  # s, of a clock that stops between rules
        self.plan = PLANS[plan]
        self.campaign = None
        self.applied = None  #: the campaign that running timers got
        self.store = Store(self.server, lambda: PolicySet({"default": self.plan, **TAGGED}, self._campaigns()))
        self.store.push(self.store.policies())
        self.chats = {each: Chat() for each in SESSIONS}
        self.held = {each: [] for each in WATCHERS}
        self.handed_in = []  #: the last that were
        self.marking = []  #: between the last look and what the ledger makes of them
        self.names = {each: {} for each in SESSIONS}  #: by arming, the instant

    def _campaigns(self):
        return (self.campaign,) if self.campaign else ()

    def _rules_of(self, tags):
        """The policies of a session, with the campaign's threshold."""
        answers = self.plan.after == CUSTOMER
        answer = TAGGED["help"] if "help" in tags else self.plan if answers else None
        guide = TAGGED["new-vip" if "new" in tags else "vip"] if "vip" in tags else None if answers else self.plan
        if self.campaign and guide:
            guide = replace(guide, threshold=self.campaign.threshold)
        return Rules(guide, answer)

    def _rules(self, chat):
        return self._rules_of(chat.tags)

    def _at_now(self):
        self.store.clock_offset = self.now * TICK
        return self.store

    # --- rules ----------------------------------------------------------------------------------------------------

    @rule(session=st.sampled_from(SESSIONS), kind=USER_FRAMES, seq=SEQS, tags=TAGS)
    def the_user(self, session, kind, seq, tags):
        self._frame(session, "user", kind, seq, tags=tags)

    @rule(session=st.sampled_from(SESSIONS), kind=AGENT_FRAMES, seq=SEQS)
    def the_agent(self, session, kind, seq):
        self._frame(session, "agent", kind, seq)

    @rule(session=st.sampled_from(SESSIONS), by=st.sampled_from(("user", "agent")), kind=AGENT_FRAMES, seq=SEQS)
    def agent_frame_after_the_close(self, session, by, kind, seq):
        self._frame(session, by, "close", None)
        self._frame(session, "agent", kind, seq)

    @rule(session=st.sampled_from(SESSIONS), watcher=st.sampled_from(WATCHERS), kind=USER_FRAMES)
    def the_user_comes_back_at_the_last_moment(self, session, watcher, kind):
        self._frame(session, "user", "message", None)
        self.time_passes(61)
        self.a_watcher_claims(watcher)
        self._frame(session, "user", kind, None)

    @rule(session=st.sampled_from(SESSIONS), watcher=st.sampled_from(WATCHERS))
    def the_user_is_silent(self, session, watcher):
        self._frame(session, "user", "ping", None)
        self.time_passes(61)
        self.a_watcher_claims(watcher)

    @rule(session=st.sampled_from(SESSIONS))
    def a_page_of_a_user_who_has_written_pings(self, session):
        self._frame(session, "user", "ping", None, spoken=True)

    @rule(session=st.sampled_from(SESSIONS), watcher=st.sampled_from(WATCHERS))
    def a_ping_falls_between_send_and_confirm(self, session, watcher):
        self._frame(session, "user", "message", None)
        self.time_passes(61)
        self.a_watcher_claims(watcher)
        self.messages_go_out()
        self._frame(session, "user", "ping", None)
        self.confirms(watcher)

    @rule(session=st.sampled_from(SESSIONS), watcher=st.sampled_from(WATCHERS), kind=USER_FRAMES)
    def the_customer_waits_for_an_agent(self, session, watcher, kind):
        self.operator_edits_the_policy("answer")
        self._frame(session, "user", "message", None)
        self._frame(session, "user", kind, None)
        self.time_passes(61)
        self.a_watcher_claims(watcher)
        self._frame(session, "user", kind, None)
        self.confirms(watcher)

    @rule(session=st.sampled_from(SESSIONS), watcher=st.sampled_from(WATCHERS))
    def the_agent_wrote_last(self, session, watcher):
        self.operator_edits_the_policy("agent")
        self._frame(session, "user", "message", None)
        self._frame(session, "agent", "message", None)
        self.time_passes(61)
        self.a_watcher_claims(watcher)

    @rule(session=st.sampled_from(SESSIONS), watcher=st.sampled_from(WATCHERS), kind=AGENT_FRAMES)
    def the_agent_is_faster_than_the_message(self, session, watcher, kind):
        self._frame(session, "user", "message", None)
        self.time_passes(61)
        self.a_watcher_claims(watcher)
        self.confirms(watcher)
        self._frame(session, "agent", kind, None)
        self.messages_go_out()

    def _frame(self, session, sender, kind, seq, *, spoken=False, tags=()):
        frame = Frame(session, "ann", sender=sender, kind=kind, seq=seq, spoken=spoken, tags=tags)
        (noted,) = self._at_now().note_activity([frame])
        chat = self.chats[session]
        assert noted.outcome == chat.apply_frame(frame, self._rules_of(tags or chat.tags), self.now)
        if chat.deadline is None:
            assert noted.deadline_ms == 0
        elif noted.outcome == COUNTED:
            assert noted.deadline_ms / 1000 == pytest.approx(chat.deadline, abs=0.001)

    @rule(seconds=st.sampled_from((1, 5, 12, 31, 61, 125, 250)))
    def time_passes(self, seconds):
        self.now += seconds

    @rule(watcher=st.sampled_from(WATCHERS))
    def a_watcher_claims(self, watcher):
        claims = self._at_now().claim_silent(100, timedelta(seconds=LEASE))
        due = {session: chat for session, chat in self.chats.items() if chat.claim(self._rules(chat), self.now)}
        assert {each.session_id for each in claims.silences} == set(due)
        for claim in claims.silences:
            chat = due[claim.session_id]
            chat.in_flight_until = self.now + LEASE
            chat.claimed = True
            assert (claim.nudge, claim.for_agent) == (chat.nudges + 1, chat.writer == WAITING)
            assert claim.deadline_ms / 1000 == pytest.approx(chat.deadline, abs=0.001)
            self._check_name(claim, chat.arming)
            self.held[watcher].append((claim, chat.arming))

    def _check_name(self, claim, arming):
        """Each silence has one name however often it is claimed, and later silences have later names.

        The core stores equal names once, so each silence is recorded exactly once.
        """
        names = self.names[claim.session_id]
        assert names.setdefault(arming, claim.armed_at) == claim.armed_at
        assert list(names) == sorted(names)
        assert list(names.values()) == sorted(set(names.values()))

    @rule(watcher=st.sampled_from(WATCHERS))
    def confirms(self, watcher):
        held, self.held[watcher] = self.held[watcher], []
        assert self._at_now().confirm([claim for claim, _ in held]) == len(self._still_ours(held))
        for chat in self._still_ours(held):
            chat.confirm(self._rules(chat), self.now)
        # The answer was lost: it is done again and does nothing.
        assert self._at_now().confirm([claim for claim, _ in held]) == 0
        self.handed_in = [*self.handed_in, *held][-10:]

    @rule(watcher=st.sampled_from(WATCHERS))
    def watcher_releases(self, watcher):
        held, self.held[watcher] = self.held[watcher], []
        assert self._at_now().release([claim for claim, _ in held]) == len(self._still_ours(held))
        for chat in self._still_ours(held):
            chat.in_flight_until = None

    def _still_ours(self, held):
        """A watcher that slept over its lease may hold what another one has by now: the same silence, so either may
        confirm it."""
        found = {}
        for claim, arming in held:
            chat = self.chats[claim.session_id]
            if chat.arming == arming and chat.in_flight_until is not None:
                found[claim.session_id] = chat
        return list(found.values())

    @rule(watcher=st.sampled_from(WATCHERS))
    def a_watcher_dies(self, watcher):
        self.held[watcher] = []

    @rule()
    def scripts_are_flushed(self):
        self.server.client.script_flush()

    @rule(happens=RARELY)
    def redis_is_flushed(self, happens):
        if not happens:
            return
        self.server.client.flushall()
        # A name of a forgotten session comes back at no later instant.
        self.now += 1
        self.chats = {session: Chat(arming=chat.arming + 1) for session, chat in self.chats.items()}
        self.applied = None

    @rule(plan=st.sampled_from(sorted(PLANS)))
    def operator_edits_the_policy(self, plan):
        self.plan = PLANS[plan]
        self.store.push(self.store.policies())

    @rule(begins=st.booleans(), seconds=CAMPAIGN, ago=st.sampled_from((0, 0, 200)))
    def a_campaign_begins_or_ends(self, begins, seconds, ago):
        at = datetime.fromtimestamp(self.now - ago, UTC)
        self.campaign = Override(at, at + timedelta(days=90), timedelta(seconds=seconds)) if begins else None
        self.store.push(self.store.policies())

    @rule(seconds=CAMPAIGN)
    def operator_edits_the_campaign(self, seconds):
        if self.campaign:
            self.campaign = replace(self.campaign, threshold=timedelta(seconds=seconds))
            self.store.push(self.store.policies())

    @rule()
    def running_timers_get_the_campaign(self):
        while self._at_now().rearm_for_campaign():
            pass
        if not self.campaign or self.applied == self.campaign or not self.server.client.exists(POLICIES[0]):
            return
        self.applied = self.campaign
        for session, chat in self.chats.items():
            if chat.deadline is None or chat.in_flight_until is not None or chat.deadline <= self.now + 1:
                continue
            policy = self._rules(chat).guide
            if not policy or chat.writer == WAITING or chat.graced == chat.arming:
                continue
            wanted = deadline_of(policy, chat.timer_from, chat.nudges)
            found = stats.session_snapshot(self.store, session).deadline
            assert found
            if wanted > self.now + 1:
                assert found.timestamp() == pytest.approx(wanted, abs=0.001)
                chat.deadline = wanted
            else:
                assert self.now + 1 < found.timestamp() <= self.now + 11.001
                chat.deadline = found.timestamp()

    @rule()
    def worker_confirms_waiting_messages(self):
        self._look(going_out=False)

    @rule()
    def messages_go_out(self):
        self._note(self._look(going_out=True), sent=True)

    @rule()
    def the_ledger_stops_messages(self):
        self._note(self._look(going_out=True), sent=False)

    @rule()
    def messages_are_about_to_go_out(self):
        self.marking = [*self.marking, *self._look(going_out=True)][-10:]

    @rule(sent=st.booleans())
    def they_do_or_are_stopped(self, sent):
        marking, self.marking = self.marking, []
        self._note(marking, sent=sent)

    @rule()
    def a_worker_dies(self):
        self.marking = []

    def _look(self, *, going_out):
        """Returns those whose messages go out."""
        held = [each for claims in (*self.held.values(), self.handed_in) for each in claims]
        asked = [(claim.session_id, claim.armed_at) for claim, _ in held]
        until = [ALWAYS if going_out and not claim.for_agent else None for claim, _ in held]
        _, stand = self._at_now().still_silent(asked, send_until=until)
        for (claim, arming), stands in zip(held, stand, strict=True):
            chat = self.chats[claim.session_id]
            assert bool(stands) == (not chat.begun or chat.holds(arming))
            if going_out and not claim.for_agent and stands and chat.begun and arming not in chat.guided:
                chat.reserved.add(arming)
        return [each for each, stands in zip(held, stand, strict=True) if stands and not each[0].for_agent]

    def _note(self, messages, *, sent):
        asked = [(claim.session_id, claim.armed_at) for claim, _ in messages]
        self._at_now().note_sending(asked, [sent] * len(asked))
        for claim, arming in messages:
            chat = self.chats[claim.session_id]
            if sent and chat.begun and (chat.holds(arming) or arming in chat.reserved):
                chat.guided.add(arming)
            chat.reserved.discard(arming)

    # --- what always holds ----------------------------------------------------------------------------------------

    @invariant()
    def nothing_is_in_two_places(self):
        if not hasattr(self, "store"):
            return
        armed = sum(chat.deadline is not None and chat.in_flight_until is None for chat in self.chats.values())
        flying = sum(chat.in_flight_until is not None for chat in self.chats.values())
        shards = self.store.shards()
        listed = self.server.ask(lambda pipe: [pipe.zrange(key, 0, -1) for key in client.IDLE])
        without_timer = {decode_text(each) for group in listed for each in group}
        assert (sum(each.armed for each in shards), sum(each.in_flight for each in shards)) == (armed, flying)
        for session, chat in self.chats.items():
            found = stats.session_snapshot(self.store, session)
            assert found.nudges == len(chat.guided)
            left = found.deadline.timestamp() - chat.deadline if found.deadline and chat.deadline else 0
            assert (bool(found.deadline), left) == (chat.deadline is not None, pytest.approx(0, abs=0.001))
            assert (session in without_timer) == (
                chat.begun and not chat.closed and chat.deadline is None and not chat.paused
            )
            if chat.deadline is not None:
                kept_ms = self.server.client.pttl(SESSION[shard_of(session)] + session)
                assert kept_ms / 1000 > chat.deadline - self.now
            # No more messages than the most generous policy allows, until the user writes.
            assert len(chat.guided | chat.reserved) <= 3
        counts = [each for shard in shards for each in shard.counts.items()]
        paused = sum(chat.paused for chat in self.chats.values())
        assert sum(each.paused for each in shards) == paused
        assert sum(count for name, count in counts if name.startswith("a:")) == armed + flying
        assert sum(count for name, count in counts if name.startswith("p:")) == paused

    def teardown(self):
        """Finally one watcher runs: every unbroken silence is recorded, and then none is left."""
        if not hasattr(self, "store"):
            return
        self.a_watcher_dies("two")
        for _ in range(24):
            self.now += 3 * DAY
            self.held["one"] = []
            self.a_watcher_claims("one")
            if not self.held["one"] and all(chat.deadline is None for chat in self.chats.values()):
                break
            self.confirms("one")
        assert all(chat.deadline is None for chat in self.chats.values())


@pytest.fixture
def machine(store_url):
    server = StoppedClockServer(store_url)
    yield type("Machine", (Machine,), {"server": server})
    server.client.close()


@pytest.mark.parametrize("examples", [45, pytest.param(600, marks=pytest.mark.campaign)])
def test_store_behaves_like_model(machine, store_url, examples):
    """The scripts are those of one server. A cluster adds their keys' slots and its client, for which a third do."""
    run_state_machine_as_test(
        machine,
        settings=settings(
            max_examples=examples // 3 if is_cluster(store_url) else examples, stateful_step_count=50,
            suppress_health_check=list(HealthCheck),
        ),
    )  # fmt: skip
