"""Actions on shops and platforms open gates; an opened gate publishes wake-ups."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

import pytest

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


def woken_shops(sent_wakeups: list[Any]) -> list[int]:
    return [wakeup.route for wakeup in sent_wakeups]


def test_record_login_is_stored_once_and_wakes_shop(market: Market, woken_by_work: list[Any]) -> None:
    Shop.objects.filter(pk=market.s1.pk).update(login_state="needed", login_lost_at=AT)
    assert shops.record_login(market.s1.pk, by="ann")
    row = Shop.objects.get(pk=market.s1.pk)
    assert (row.login_state, row.login_lost_at, row.version) == ("ok", None, 2)
    assert woken_shops(woken_by_work) == [market.s1.pk]
    assert not shops.record_login(market.s1.pk, by="bob")
    assert [each.history_change_reason for each in row.history.all()][:1] == ["logged in by ann"]
    assert row.history.count() == 2


def test_only_resume_wakes_the_shop(market: Market, woken_by_work: list[Any]) -> None:
    assert shops.pause_shop(market.s1.pk, by="ann")
    assert not shops.pause_shop(market.s1.pk, by="bob")
    assert woken_by_work == []
    assert shops.resume_shop(market.s1.pk, by="bob")
    assert not shops.resume_shop(market.s1.pk, by="bob")
    assert woken_shops(woken_by_work) == [market.s1.pk]


def test_resume_platform_wakes_shops_with_jobs(market: Market, woken_by_work: list[Any]) -> None:
    assert shops.pause_platform(market.pdd.pk, by="ann")
    assert shops.resume_platform(market.pdd.pk, by="ann")
    assert woken_shops(woken_by_work) == [market.s1.pk]
    said = [each.history_change_reason for each in market.pdd.history.order_by("pk")]
    assert said[1:] == ["paused by ann", "resumed by ann"]


def test_close_breaker_wakes_shops(market: Market, woken_by_work: list[Any]) -> None:
    assert not shops.close_breaker(market.pdd.pk, by="ann")
    Breaker.objects.filter(platform=market.pdd).update(errors=3, open_until=AT, opened_at=AT, openings=2)
    assert shops.close_breaker(market.pdd.pk, by="ann")
    row = Breaker.objects.get(platform=market.pdd)
    assert (row.errors, row.open_until, row.opened_at, row.openings) == (0, None, None, 0)
    assert woken_shops(woken_by_work) == [market.s1.pk]


def test_shop_actions_on_missing_rows_raise_not_found(market: Market) -> None:
    gone = market.shop("gone", retired_at=AT)
    for act in (shops.record_login, shops.pause_shop, shops.resume_shop):
        for pk in (0, gone.pk):
            with pytest.raises(NotFound):
                act(pk, by="ann")
    for act in (shops.pause_platform, shops.resume_platform, shops.close_breaker):
        with pytest.raises(NotFound):
            act(0, by="ann")


def test_resume_shop_wakes_only_after_commit(market: Market, woken_by_work: list[Any]) -> None:
    from django.db import transaction

    shops.pause_shop(market.s1.pk, by="ann")
    with transaction.atomic():
        shops.resume_shop(market.s1.pk, by="ann")
        assert woken_by_work == []
    assert woken_shops(woken_by_work) == [market.s1.pk]
