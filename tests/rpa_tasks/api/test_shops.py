"""Actions on shops and platforms open gates; an opened gate publishes wake-ups."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

import pytest
from django.db import transaction

from rpa_tasks.jobs import shops
from rpa_tasks.jobs.publish import PublishRequest, publish_job
from rpa_tasks.models import Breaker, Shop
from scheduling.errors import NotFound
from tests.rpa_tasks.api.conftest import Market

pytestmark = pytest.mark.django_db(transaction=True)

AT = datetime(2026, 3, 1, tzinfo=UTC)


@pytest.fixture
def woken_by_work(market: Market, sent_wakeups: list[Any]) -> list[Any]:
    """The first shop has work, the second one has none."""
    publish_job(PublishRequest(platform="pdd", shop_id="s1", task_type="sync_order"))
    sent_wakeups.clear()
    return sent_wakeups


def test_each_opened_gate_wakes_the_shops_behind_it_once(market: Market, woken_by_work: list[Any]) -> None:
    Shop.objects.filter(pk=market.s1.pk).update(login_state="needed", login_lost_at=AT)
    Breaker.objects.filter(platform=market.pdd).update(errors=3, open_until=AT, opened_at=AT, openings=2)
    for close, open_gate, pk in (
        (None, shops.record_login, market.s1.pk),
        (None, shops.close_breaker, market.pdd.pk),
        (shops.pause_shop, shops.resume_shop, market.s1.pk),
        (shops.pause_platform, shops.resume_platform, market.pdd.pk),
    ):
        if close is not None:
            assert close(pk, by="ann")
            assert not close(pk, by="bob")
        with transaction.atomic():
            assert open_gate(pk, by="ann")
            assert woken_by_work == [], "before the commit no node sees that it may start"
        assert [wakeup.route for wakeup in woken_by_work] == [market.s1.pk]
        assert not open_gate(pk, by="bob")
        woken_by_work.clear()

    shop, breaker = Shop.objects.get(pk=market.s1.pk), Breaker.objects.get(platform=market.pdd)
    assert (shop.login_state, shop.login_lost_at, shop.version) == ("ok", None, 4)
    assert (breaker.errors, breaker.open_until, breaker.opened_at, breaker.openings) == (0, None, None, 0)
    said = ["logged in by ann", "paused by ann", "resumed by ann"]
    assert [each.history_change_reason for each in shop.history.order_by("pk")][1:] == said
    assert [each.history_change_reason for each in market.pdd.history.order_by("pk")][1:] == said[1:]


def test_shop_actions_on_missing_rows_raise_not_found(market: Market) -> None:
    gone = market.shop("gone", retired_at=AT)
    for act in (shops.record_login, shops.pause_shop, shops.resume_shop):
        for pk in (0, gone.pk):
            with pytest.raises(NotFound):
                act(pk, by="ann")
    for act in (shops.pause_platform, shops.resume_platform, shops.close_breaker):
        with pytest.raises(NotFound):
            act(0, by="ann")
