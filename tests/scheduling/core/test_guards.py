"""Each guard alone, their order, and the next eligible time of a touch."""

from dataclasses import replace
from datetime import time, timedelta
from itertools import combinations

from hypothesis import given
from hypothesis import strategies as st

from scheduling.experiments.conversion import DRAWN_RULES
from scheduling.policy import guards
from scheduling.policy.guards import HOLD, SEND, SUPPRESS, AwaitedTouch, GuardVerdict, judge_touch
from scheduling.policy.node_conditions import Facts, compile_condition
from scheduling.policy.send_times import (
    SPREAD,
    CalendarSpec,
    CalendarsSpec,
    TimingSpec,
    compile_windows,
    parse_window_line,
)
from scheduling.policy.specs import HoldoutSpec, RuleCoverage
from tests.scheduling.core.sample_data import (
    CAP,
    COMMUNITY_CAP,
    COMMUNITY_DEDUPE,
    CONVERSATION,
    DAY,
    DEDUPE,
    HOUR,
    NIGHT,
    NOON,
    RULES,
    ann,
    around,
    candidate,
    node,
    slot,
    template,
    unsettled,
)
from tests.support.tables import each_row

SECOND = timedelta(seconds=1)
INSTANT = timedelta(microseconds=1)


def test_guard_expires_after_the_last_instant():
    touch = candidate(expires_at=NOON)

    assert judge_touch(touch, around(), NOON).decision == SEND

    late = judge_touch(touch, around(), NOON + INSTANT)
    assert (late.decision, late.rule, late.rule_version) == (SUPPRESS, "expired", touch.node.version)


@each_row("scope", ["all", "channel:log", "node:guide"])
def test_guard_pause_holds_under_the_widest_scope(scope):
    verdict = judge_touch(candidate(), around(paused=frozenset({scope, "node:guide"})), NOON)
    assert (verdict.decision, verdict.rule, verdict.observed) == (HOLD, "paused", scope)
    assert verdict.next_eligible_at is None
    elsewhere = around(paused=frozenset({"channel:hook", "node:other", "channel:guide", "node:log"}))
    assert judge_touch(candidate(), elsewhere, NOON).decision == SEND


def test_guard_opt_out_blocks_marketing_only():
    marketing = candidate(customer=ann(opted_out=True))
    service = candidate(customer=ann(opted_out=True), template=template(category="service"))

    assert judge_touch(marketing, around(), NOON).rule == "opted_out"
    assert judge_touch(service, around(), NOON).decision == SEND


def test_guard_conversation_after_event_suppresses():
    def with_conversation_at(instant):
        return judge_touch(candidate(event_at=NOON - HOUR, customer=ann(conversation_at=instant)), around(), NOON)

    newer = with_conversation_at(NOON - HOUR + INSTANT)
    assert (newer.decision, newer.rule, newer.rule_version) == (SUPPRESS, "conversation", CONVERSATION.version)
    assert with_conversation_at(NOON - HOUR).decision == SEND


def test_guard_presence_objections():
    """A live conversation needs the rule and a node that obeys it. A silence is judged everywhere."""
    obeys, ignores = candidate(), candidate(node=node(guard_conversation="ignore"))
    live = around(presence_block="conversation")
    assert judge_touch(obeys, live, NOON).rule == "conversation"
    assert judge_touch(ignores, live, NOON).decision == SEND
    assert judge_touch(obeys, around(rules=(CAP,), presence_block="conversation"), NOON).decision == SEND

    answered = judge_touch(ignores, around(rules=(), presence_block="answered"), NOON)
    assert (answered.decision, answered.rule) == (SUPPRESS, "answered")
    unknown = judge_touch(ignores, around(rules=(), presence_block="presence_unknown"), NOON)
    assert (unknown.decision, unknown.next_eligible_at) == (HOLD, NOON + timedelta(seconds=30))


def test_guard_quiet_hours_use_customer_time_zone():
    evening = NOON + 3 * HOUR  # 23:00 in Shanghai, 16:00 in Berlin
    rules = around(rules=(NIGHT,))

    verdict = judge_touch(candidate(), rules, evening)
    assert (verdict.decision, verdict.rule, verdict.rule_version) == (HOLD, "quiet_hours", NIGHT.version)
    assert verdict.next_eligible_at is not None
    assert timedelta(0) <= verdict.next_eligible_at - (NOON + 12 * HOUR) < SPREAD  # 08:00 in Shanghai
    assert (verdict.observed, verdict.limit) == ("23:00", "22:00–08:00 Asia/Shanghai")

    assert judge_touch(candidate(customer=ann(timezone="Europe/Berlin")), rules, evening).decision == SEND
    assert judge_touch(candidate(node=node(guard_quiet_hours="ignore")), rules, evening).decision == SEND


def test_end_of_quiet_hours_is_spread_within_expiry_and_waking_hours():
    """All touches of a night would be due at one moment."""
    evening, morning = NOON + 3 * HOUR, NOON + 12 * HOUR

    def ends(rule, **values):
        rules = around(rules=(rule,))
        customers = [ann(user_id=f"user-{number}") for number in range(500)]
        verdicts = [judge_touch(candidate(customer=each, **values), rules, evening) for each in customers]
        return [each.next_eligible_at for each in verdicts if each.next_eligible_at]

    spread = ends(NIGHT)
    assert len(spread) == 500
    assert all(morning <= each < morning + SPREAD for each in spread)
    assert len({each.replace(second=each.second // 10 * 10, microsecond=0) for each in spread}) == 12
    assert set(ends(NIGHT, expires_at=morning + SECOND / 1_000)) == {morning}
    assert morning + 50 * SECOND < max(ends(NIGHT, expires_at=morning + 70 * SECOND)) < morning + 60 * SECOND
    short_day = replace(NIGHT, quiet_from=time(8, 1), quiet_to=time(8))
    assert max(ends(short_day)) < morning + timedelta(minutes=1)


def test_opening_of_a_send_window_is_spread_within_expiry():
    """A touch that expired during the spread was suppressed, although its window opened before."""
    opens_at = NOON + HOUR
    timing = TimingSpec(
        CalendarSpec(), windows=compile_windows([parse_window_line("daily 21:00-22:00")], CalendarsSpec())
    )

    def resumes(expires_at):
        customers = [ann(user_id=f"user-{number}") for number in range(50)]
        touches = [candidate(customer=each, node=node(timing=timing), expires_at=expires_at) for each in customers]
        verdicts = [judge_touch(touch, around(), NOON) for touch in touches]
        assert {(each.decision, each.rule) for each in verdicts} == {(HOLD, "send_window")}
        return {each.next_eligible_at for each in verdicts}

    assert len(resumes(NOON + DAY)) > 40
    assert resumes(opens_at + INSTANT) == {opens_at}
    before_expiry = resumes(opens_at + 70 * SECOND)
    assert len(before_expiry) > 40
    assert max(filter(None, before_expiry)) < opens_at + 60 * SECOND, "ten seconds are left to send it"


# --- the same content ------------------------------------------------------------------------------------------------


def test_guard_dedupe_ends_after_its_window():
    """It is never deferred, also at a node that defers what is over the cap."""
    told = around(slots=[slot(72, "guide")])
    touch = candidate(node=node(over_cap="defer"))

    early = judge_touch(touch, told, NOON - INSTANT)
    assert (early.decision, early.rule, early.next_eligible_at) == (SUPPRESS, "dedupe", NOON)
    assert judge_touch(touch, told, NOON).decision == SEND


@each_row("other", ["survey", "guide-2", "Guide", ""])
def test_guard_dedupe_other_content_is_sent(other):
    told = around(slots=[slot(1, "guide")])
    assert judge_touch(candidate(), told, NOON).rule == "dedupe"
    assert judge_touch(candidate(template=template("guide", content_type=other)), told, NOON) == GuardVerdict(SEND)
    assert judge_touch(candidate(), around(slots=[slot(1, other)]), NOON) == GuardVerdict(SEND)


def test_guard_dedupe_ignored_still_applies_the_cap():
    ignoring = candidate(node=node(guard_dedupe="ignore"))
    assert judge_touch(candidate(), around(slots=[slot(1, "guide")]), NOON).rule == "dedupe"
    assert judge_touch(ignoring, around(slots=[slot(1, "guide")]), NOON) == GuardVerdict(SEND)
    assert judge_touch(ignoring, around(slots=[slot(1, "guide")] * 3), NOON).rule == "cap"


def test_guard_dedupe_unsettled_defers_until_its_lease():
    lease = NOON + timedelta(seconds=45)
    verdict = judge_touch(candidate(), around(slots=[unsettled(lease, content_type="guide")]), NOON)
    assert (verdict.decision, verdict.rule, verdict.next_eligible_at) == (HOLD, "dedupe", lease)


# --- caps ------------------------------------------------------------------------------------------------------------


@each_row("switch", ["count_only", "ignore"])
def test_guard_cap_can_be_ignored_by_node(switch):
    touch = candidate(node=node(guard_cap=switch))
    full = around(
        rules=(CAP, COMMUNITY_CAP),
        slots=[slot()] * 3,
        community_slots=[slot(0.1)] * 2,
        important=[AwaitedTouch(NOON + SECOND)],
    )
    assert judge_touch(touch, full, NOON).decision == SEND


def test_guard_cap_defers_if_touch_lives_long_enough():
    full = around(slots=[slot(1), slot(2), slot(20)])
    free_at = NOON + 4 * HOUR

    patient = judge_touch(candidate(node=node(over_cap="defer"), expires_at=free_at), full, NOON)
    mortal = judge_touch(candidate(node=node(over_cap="defer"), expires_at=free_at - INSTANT), full, NOON)

    assert (patient.decision, patient.rule, patient.next_eligible_at) == (HOLD, "cap", free_at)
    assert (mortal.decision, mortal.rule, mortal.next_eligible_at) == (SUPPRESS, "cap", free_at)


def test_guard_cap_unsettled_slots_defer_until_lease():
    """Or for a second, where the lease is over."""
    first, second = NOON + timedelta(seconds=20), NOON + timedelta(seconds=40)
    verdict = judge_touch(candidate(), around(slots=[slot(1), unsettled(second), unsettled(first)]), NOON)
    assert (verdict.decision, verdict.rule, verdict.next_eligible_at) == (HOLD, "cap", first)
    assert verdict.observed == "3 (2 unsettled)"
    expired = judge_touch(candidate(), around(slots=[unsettled(NOON - HOUR)] * 3), NOON)
    assert (expired.decision, expired.next_eligible_at) == (HOLD, NOON + SECOND)


def test_guard_community_cap_is_separate():
    full = around(rules=(COMMUNITY_CAP,), community_slots=[slot(0.25), slot(0.5)])

    verdict = judge_touch(candidate(), full, NOON)

    assert (verdict.decision, verdict.rule, verdict.rule_version) == (SUPPRESS, "community_cap", 11)
    assert verdict.next_eligible_at == NOON + HOUR / 2
    assert judge_touch(candidate(chat_id=""), full, NOON).decision == SEND
    assert judge_touch(candidate(), around(rules=(COMMUNITY_CAP,), slots=[slot(0.5)] * 9), NOON).decision == SEND


def test_guard_retry_with_slot_passes_the_cap_only():
    full = around(
        rules=(CAP, DEDUPE, COMMUNITY_CAP), slots=[slot(1, "guide")] * 3, community_slots=[slot(0.1)] * 2,
        important=[AwaitedTouch(NOON + SECOND)] * 3,
    )  # fmt: skip
    assert judge_touch(candidate(has_cap_slot=True), full, NOON).decision == SEND
    assert judge_touch(candidate(has_cap_slot=False), full, NOON).decision != SEND
    for customer, rule in [(ann(opted_out=True), "opted_out"), (ann(conversation_at=NOON), "conversation")]:
        assert judge_touch(candidate(has_cap_slot=True, customer=customer), around(), NOON).rule == rule


def test_guard_rollout_suppresses_other_communities():
    later = node(rollout_percent=0, rollout_communities=frozenset({"c2"}))
    assert judge_touch(candidate(node=later, chat_id="c1"), around(), NOON).rule == "rollout"
    assert judge_touch(candidate(node=later, chat_id="c2"), around(), NOON).decision == SEND


def test_guard_cap_suppresses_and_gives_next_time():
    full = around(slots=[slot(1), slot(5), slot(23)])
    verdict = judge_touch(candidate(), full, NOON)
    assert (verdict.decision, verdict.rule, verdict.rule_version) == (SUPPRESS, "cap", CAP.version)
    assert (verdict.observed, verdict.limit) == ("3", "3 in 1d")
    assert verdict.next_eligible_at == NOON + HOUR
    for room in ([slot(1), slot(23), slot(24)], [slot(1, counts=False)] * 5):
        assert judge_touch(candidate(), around(slots=room), NOON).decision == SEND


def test_guard_own_slot_is_not_counted():
    touch = candidate()
    own = slot(1, "guide", task_id=touch.task_id)
    assert judge_touch(touch, around(slots=[own, slot(2), slot(3)]), NOON).decision == SEND


def test_guard_community_dedupe_is_separate():
    said = around(rules=(COMMUNITY_DEDUPE,), community_slots=[slot(1, "guide")])
    verdict = judge_touch(candidate(), said, NOON)
    assert (verdict.decision, verdict.rule, verdict.rule_version) == (SUPPRESS, "community_dedupe", 12)
    assert judge_touch(candidate(template=template("survey")), said, NOON).decision == SEND
    assert judge_touch(candidate(node=node(guard_dedupe="ignore")), said, NOON).decision == SEND
    to_ann = around(rules=(COMMUNITY_DEDUPE,), slots=[slot(1, "guide")])
    assert judge_touch(candidate(), to_ann, NOON).decision == SEND


# --- a part of the messages, and levels ------------------------------------------------------------------------------

SALE = replace(CAP, limit=1, kinds=("channel sms", "tag sale"), coverage=RuleCoverage(*[frozenset({1})] * 3))


def test_guard_cap_of_a_part_counts_and_limits_that_part_only():
    """Node 1 has the rule's channel and tag, template 1 its category."""
    inside, other_node, other_text = slot(1, node_id=1, template_id=1), slot(1, node_id=2), slot(1, node_id=1)
    touch, unlimited = candidate(), candidate(node=node(id=2))
    verdict = judge_touch(touch, around(rules=(SALE,), slots=[inside, other_node]), NOON)
    assert (verdict.decision, verdict.rule) == (SUPPRESS, "cap")
    assert (verdict.observed, verdict.limit) == ("1", "1 in 1d of channel sms, tag sale")
    assert judge_touch(touch, around(rules=(SALE,), slots=[other_node, other_text]), NOON).decision == SEND
    assert judge_touch(unlimited, around(rules=(SALE,), slots=[inside]), NOON).decision == SEND


def test_guard_slot_is_kept_for_touches_of_the_part_only():
    inside, outside = AwaitedTouch(NOON + SECOND, 1), AwaitedTouch(NOON + SECOND, 2)
    assert judge_touch(candidate(), around(rules=(SALE,), important=[inside]), NOON).rule == "slot_hold"
    assert judge_touch(candidate(), around(rules=(SALE,), important=[outside]), NOON).decision == SEND


def test_guard_limit_of_the_level_replaces_the_limit():
    by_level = replace(CAP, limit=1, limits={"vip": 2})

    def judged(level, slots, **context):
        said = around(rules=(by_level,), slots=[slot()] * slots, **context)
        return judge_touch(candidate(customer=ann(level=level)), said, NOON)

    assert [judged(level, 1).decision for level in ("vip", "normal", "")] == [SEND, SUPPRESS, SUPPRESS]
    assert (judged("vip", 2).decision, judged("vip", 2).limit) == (SUPPRESS, "2 in 1d")
    assert judged("vip", 1, important=[AwaitedTouch(NOON)]).rule == "slot_hold"
    assert judged("vip", 0, important=[AwaitedTouch(NOON)]).decision == SEND


# --- room for the more important -------------------------------------------------------------------------------------


def test_guard_last_slot_waits_for_higher_priority():
    """Two seconds longer than its due time, or from now where it is overdue."""
    for due, until in [(NOON + timedelta(seconds=50), NOON + timedelta(seconds=52)), (NOON - HOUR, NOON + 2 * SECOND)]:
        verdict = judge_touch(candidate(), around(slots=[slot(1), slot(2)], important=[AwaitedTouch(due)]), NOON)
        assert (verdict.decision, verdict.rule, verdict.next_eligible_at) == (HOLD, "slot_hold", until)


# --- order -----------------------------------------------------------------------------------------------------------

AT_NIGHT = compile_windows([parse_window_line("daily 02:00-03:00")], CalendarsSpec())
#: What makes each rule refuse, in the order of the rules.
OBJECTIONS = {
    "cancelled": {"called_off": "event:order.paid"},
    "expired": {"expires_at": NOON - SECOND},
    "node_disabled": {"enabled": False},
    "paused": {"paused": frozenset({"all"})},
    "opted_out": {"opted_out": True},
    "depth": {"trigger": "touch.delivered", "from_nodes": frozenset({"other"})},
    "condition": {"condition": compile_condition({"all": [{"field": "event.data.total", "op": "exists"}]})},
    "conversation": {"conversation_at": NOON},
    "holdout": {"holdout_percent": 100},
    "rollout": {"rollout_percent": 0},
    "quiet_hours": {"timezone": "Pacific/Auckland"},  # 01:00 there
    "send_window": {"timing": TimingSpec(CalendarSpec(), windows=AT_NIGHT)},
    "dedupe": {"guide_slot": True},
    "community_dedupe": {"community_guide": True},
    "cap": {"full": True},
    "community_cap": {"community_full": True},
    "slot_hold": {"important": [AwaitedTouch(NOON + SECOND)] * 3},
}


OF_NODE = ("trigger", "from_nodes", "enabled", "holdout_percent", "rollout_percent", "condition", "timing")


def first_objection(*names):
    said = {key: value for name in names for key, value in OBJECTIONS[name].items()}
    slots = [slot(1, "guide", counts=False)] if "guide_slot" in said else []
    slots += [slot(1)] * 3 if "full" in said else []
    community_slots = [slot(1, "guide", counts=False)] if "community_guide" in said else []
    community_slots += [slot(0.1)] * 2 if "community_full" in said else []
    touch = candidate(
        expires_at=said.get("expires_at", NOON + 3 * DAY),
        customer=ann(**{key: said[key] for key in ("opted_out", "conversation_at", "timezone") if key in said}),
        node=node(**{key: said[key] for key in OF_NODE if key in said}),
        facts=Facts({"depth": 1}, "c1", ""),
    )
    verdict = judge_touch(
        touch,
        around(
            rules=RULES, paused=said.get("paused", frozenset()), slots=slots, important=said.get("important", ()),
            community_slots=community_slots,
            cancelled_by=said.get("called_off", ""),
        ),
        NOON,
    )  # fmt: skip
    return "cancelled" if verdict.rule == "event:order.paid" else verdict.rule


def test_guard_first_documented_objection_is_given():
    for name in OBJECTIONS:
        assert first_objection(name) == name
    for first, second in combinations(OBJECTIONS, 2):
        assert first_objection(first, second) == first, second


def test_guard_objections_are_complete_and_drawn_rules_start_at_the_holdout():
    names = {check: name for name, check in vars(guards).items() if check in guards.CHECKS}
    assert list(OBJECTIONS) == [names[check].removeprefix("_judge_") for check in guards.CHECKS]
    said = list(map(first_objection, OBJECTIONS))
    assert list(DRAWN_RULES) == said[said.index("holdout") :]


# --- the next eligible time ------------------------------------------------------------------------------------------

minutes_ago = st.integers(min_value=1, max_value=10 * 24 * 60)
histories = st.lists(minutes_ago, max_size=12)
caps = st.lists(
    st.builds(
        lambda limit, hours: replace(CAP, limit=limit, window=timedelta(hours=hours)),
        st.integers(1, 5),
        st.integers(1, 200),
    ),
    min_size=1,
    max_size=3,
)


def eligible(rules, slots, at):
    return (
        judge_touch(candidate(expires_at=NOON + 365 * DAY), around(rules=tuple(rules), slots=slots), at).decision
        == SEND
    )


@given(caps, histories)
def test_guard_next_eligible_time_is_exact(rules, history):
    slots = [slot(minutes / 60) for minutes in history]
    touch = candidate(node=node(over_cap="defer"), expires_at=NOON + 365 * DAY)

    verdict = judge_touch(touch, around(rules=tuple(rules), slots=slots), NOON)

    if verdict.decision == HOLD:
        assert verdict.next_eligible_at is not None
        assert not eligible(rules, slots, verdict.next_eligible_at - INSTANT)
        assert eligible(rules, slots, verdict.next_eligible_at)


@given(histories, st.lists(st.integers(1, 120), min_size=1, max_size=6))
def test_guard_unsettled_slots_alone_never_suppress(settled, leases):
    slots = [slot(minutes / 60) for minutes in settled]
    slots += [unsettled(NOON + timedelta(seconds=seconds)) for seconds in leases]
    verdict = judge_touch(candidate(), around(rules=(CAP,), slots=slots), NOON)

    full_by_itself = sum(each.settled and each.at > NOON - CAP.window for each in slots) >= CAP.limit
    assert (verdict.decision == SUPPRESS) == full_by_itself


@given(st.data())
def test_guard_checks_of_node_give_the_verdict_of_all(data):
    def draw(*choices):
        return data.draw(st.sampled_from(choices))

    one = node(
        enabled=draw(True, True, False), holdout_percent=draw(0, 50, 100), rollout_percent=draw(100, 50, 0),
        rollout_communities=draw(frozenset(), frozenset({"c1"})), guard_cap=draw("apply", "count_only", "ignore"),
        guard_dedupe=draw("apply", "ignore"), guard_conversation=draw("apply", "ignore"),
        guard_quiet_hours=draw("apply", "ignore"), over_cap=draw("suppress", "defer"),
        global_holdout=draw(None, None, HoldoutSpec(50)),
    )  # fmt: skip
    every = (
        CAP, COMMUNITY_CAP, DEDUPE, COMMUNITY_DEDUPE, CONVERSATION, replace(NIGHT, quiet_from=NOON.time()), SALE,
    )  # fmt: skip
    paused = draw(frozenset(), frozenset({"node:guide"}), frozenset({"channel:other"}))
    touch = candidate(
        node=one, chat_id=draw("c1", ""), has_cap_slot=draw(False, True), expires_at=draw(NOON + DAY, NOON - SECOND),
        customer=ann(opted_out=draw(False, True), conversation_at=draw(None, NOON), user_id=draw("ann", "bob", "eve")),
        template=template(category=draw("service", "marketing")),
    )  # fmt: skip
    slots = [slot(hours, draw("guide", "other")) for hours in data.draw(st.lists(st.integers(0, 30), max_size=4))]
    around_it = around(
        rules=tuple(data.draw(st.lists(st.sampled_from(every), unique=True))), paused=paused, slots=slots,
        community_slots=draw([], slots), important=draw([], [AwaitedTouch(NOON + SECOND)]),
        cancelled_by=draw("", "", "event:x"), presence_block=draw("", "", "conversation", "answered"),
    )  # fmt: skip

    some = around_it._replace(checks=guards.checks_for(one, around_it.rules, paused))

    assert judge_touch(touch, some, NOON) == judge_touch(touch, around_it, NOON)
