"""How long a touch waits, and which touches an event plans: the article's figures."""

from datetime import timedelta

from scheduling.policy.matrix import delay_for, plan_touches
from scheduling.policy.specs import DelayRulesSpec
from tests.scheduling.core.sample_data import ARTICLE, DAY, HOUR, NOON, ann, event, node
from tests.support.tables import each_row

DYNAMIC, FIXED = node(dynamic=True), node(delay=7 * DAY)
OWN = node(dynamic=True, delay_rules=DelayRulesSpec({"vip": timedelta(seconds=10)}, timedelta(seconds=40), HOUR, 0.5))


@each_row(
    "subject, level, idle, seconds",
    [
        (DYNAMIC, "vip", None, 3600), (DYNAMIC, "normal", None, 7200), (DYNAMIC, "gold", None, 86400),
        (DYNAMIC, "vip", HOUR, 2160), (DYNAMIC, "normal", HOUR, 4320), (DYNAMIC, "", HOUR, 51840),
        # activity counts within exactly one day
        (DYNAMIC, "vip", DAY, 2160), (DYNAMIC, "vip", DAY + timedelta(microseconds=1), 3600),
        (OWN, "vip", None, 10), (OWN, "normal", None, 40), (OWN, "vip", HOUR, 5), (OWN, "vip", 2 * HOUR, 10),
        (FIXED, "vip", HOUR, 7 * 86400),
    ],
)  # fmt: skip
def test_delay_depends_on_the_node_and_on_level_and_activity(subject, level, idle, seconds):
    customer = ann(level=level, last_active_at=None if idle is None else NOON - idle)
    assert delay_for(subject, customer, ARTICLE, occurred_at=NOON) == timedelta(seconds=seconds)
    scaled = delay_for(subject, customer, ARTICLE, occurred_at=NOON, time_scale=10)
    assert scaled == timedelta(seconds=seconds / 10)


def test_event_plans_touch_per_enabled_triggered_node():
    nodes = [
        node("first", delay=HOUR, expires_after=DAY),
        node("second", delay=2 * HOUR),
        node("other", trigger="order.paid"),
        node("off", enabled=False),
    ]

    planned = plan_touches(event(), ann(), nodes, ARTICLE)

    assert [(each.node.key, each.due_at) for each in planned] == [("first", NOON + HOUR), ("second", NOON + 2 * HOUR)]
    assert planned[0].expires_at == NOON + HOUR + DAY, "its life begins when it is due"
    (scaled, _) = plan_touches(event(), ann(), nodes, ARTICLE, time_scale=60)
    assert (scaled.due_at, scaled.expires_at) == (NOON + timedelta(minutes=1), NOON + timedelta(minutes=1) + DAY)
