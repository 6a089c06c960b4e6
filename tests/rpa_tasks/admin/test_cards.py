"""RPA on the overview."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
from django.test import Client
from django.urls import reverse
from django.utils.timezone import now

from rpa_tasks.models import ExecutionNode, LoginState, Shop
from scheduling.admin.cards import Card

pytestmark = pytest.mark.django_db


def card_for(client: Client) -> Card | None:
    cards = client.get(reverse("admin:index")).context["cards"]
    return next((card for card in cards if str(card.title) == "RPA"), None)


def test_the_card_tells_shops_jobs_and_browsers(market: Any, viewer: Client) -> None:
    due = {market.waiting("s1", priority=0).pk, market.waiting("s2", priority=0).pk}
    market.waiting("s2", priority=2, dedupe_key="b", delay=timedelta(hours=1))
    Shop.objects.filter(shop_id="s2").update(login_state=LoginState.NEEDED)
    for name, seen_at in (("n1", now()), ("gone", now() - timedelta(days=1))):
        ExecutionNode.objects.create(
            name=name, slots=5, seen_at=seen_at, started_at=seen_at,
            browsers=[{"state": "busy"}, {"state": "busy"}, {"state": "idle"}, {"state": "quarantined"}, {}],
        )  # fmt: skip
    card = card_for(viewer)
    assert card is not None
    told = {str(each.words): (each.value, each.tone) for each in card.figures}
    assert told == {
        "Shops": (2, ""), "Running": (0, ""), "Login needed": (1, "bad"),
        "Jobs due, High priority": ("2", ""), "Jobs due, Normal priority": ("0", ""),
        "Jobs due, Low priority": ("0", ""),
        "Execution nodes": (1, ""), "Browsers in use": ("2 / 5", ""), "Browsers kept warm": (1, ""),
        "Browsers quarantined": (1, "bad"),
    }  # fmt: skip
    links = {str(each.words): each.link for each in card.figures}
    assert {row.pk for row in viewer.get(links["Jobs due, High priority"]).context["cl"].result_list} == due
    login = viewer.get(links["Login needed"])
    assert login.status_code == 200
    assert {row.shop_id for row in login.context["cl"].result_list} == {"s2"}


def test_who_may_not_see_shops_has_no_card(market: Any, as_member: Callable[[str], Client]) -> None:
    from django.contrib.auth.models import User

    client = as_member("viewer")
    User.objects.get(username="viewer").groups.clear()
    assert card_for(client) is None
