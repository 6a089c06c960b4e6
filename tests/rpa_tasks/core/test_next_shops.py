"""Which shops' browsers a node pre-warms."""

from datetime import timedelta

import pytest
from django.conf import settings
from django.utils.timezone import now

from rpa_tasks.browsers.upkeep import Prewarmer
from rpa_tasks.maintainer.housekeeping import Housekeeping, find_next_shops
from rpa_tasks.models import Breaker, ExecutionNode, Job, Lane, LoginState, Shop
from tests.rpa_tasks.core.conftest import EVERY
from tests.support.tables import each_row

pytestmark = pytest.mark.django_db


@pytest.fixture
def shops(market, settings):
    """Five shops; s1 has the first job, s5 the last."""
    settings.AFTERTOUCH_RPA_WARM_BROWSERS = 3
    market.flow("look", needs_browser=True)
    for number in range(1, 6):
        market.shop(f"s{number}")
        market.publish(f"s{number}", "look", delay=timedelta(minutes=number))
    return market


def find(*queues):
    return [shop.profile.removeprefix("pdd-") for shop in find_next_shops(queues or EVERY)]


def change(shop_id, **changes):
    Shop.objects.filter(shop_id=shop_id).update(**changes)


def test_next_shops_are_those_whose_jobs_fall_due_first(shops, django_assert_max_num_queries):
    with django_assert_max_num_queries(3):
        assert find() == ["s1", "s2", "s3"]
    shops.publish("s5", "look", payload={"page": 1})
    Job.objects.filter(shop__shop_id="s4").update(state="queued", due_at=now())
    assert find() == ["s5", "s4", "s1"]


@each_row(
    "changes",
    [
        {"paused": True},
        {"login_state": LoginState.NEEDED},
        {"retired_at": now()},
        {"dedicated_queue": True},
        # To attach one closes its pages, and another node may have started the run since.
        {"browser": {"cdp_url": "http://10.0.0.5:9222"}},
    ],
)
def test_shop_that_cannot_start_here_is_not_next(shops, changes):
    change("s1", **changes)
    assert find() == ["s2", "s3", "s4"]


def test_next_shops_leave_out_running_later_and_browserless_jobs(shops):
    shops.flow("count")
    shops.shop("s6")
    shops.publish("s6", "count")
    Lane.objects.filter(shop__shop_id="s1").update(task_id=Job.objects.get(shop__shop_id="s1").pk)
    Job.objects.filter(shop__shop_id="s2").update(due_at=now() + timedelta(hours=2))
    assert find() == ["s3", "s4", "s5"]


def test_shop_of_running_node_is_not_next_here(shops):
    Lane.objects.filter(shop__shop_id__in=("s1", "s2")).update(home="n2")
    shops.node("n2")
    assert find() == ["s3", "s4", "s5"]
    ExecutionNode.objects.update(seen_at=now() - settings.AFTERTOUCH_RPA_HOME_LEASE)
    assert find() == ["s1", "s2", "s3"]


def test_resting_platform_has_no_next_shop(shops):
    Breaker.objects.update(open_until=now() + timedelta(minutes=5))
    assert find() == []


def test_shops_served_last_fill_up(shops):
    Job.objects.exclude(shop__shop_id="s4").delete()
    for number, shop_id in enumerate(("s5", "s2", "s1")):
        served = now() - timedelta(minutes=number)
        Lane.objects.filter(shop__shop_id=shop_id).update(home=settings.AFTERTOUCH_NODE, last_served_at=served)
    assert find() == ["s4", "s5", "s2"]


def test_own_queue_of_shop_is_served_by_its_node(shops):
    change("s4", dedicated_queue=True)
    assert find("s.pdd.s4") == ["s4"]


def test_housekeeping_gives_prewarmer_shops_with_settings(shops):
    change("s1", browser={"window": "800x600"})
    prewarmer = Prewarmer()
    Housekeeping(["high", "normal", "low"], prewarmer).choose_next_shops()
    first = prewarmer.wanted[0]
    assert (first.profile, first.shop, first.launch.window) == ("pdd-s1", "pdd/s1", "800x600")
