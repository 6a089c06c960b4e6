"""Start, control and end a take-over in tests."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from django.contrib.auth.models import User

from rpa_tasks.browsers.pool import AcquiredBrowser
from rpa_tasks.jobs.ledger import Pick
from rpa_tasks.models import Shop, TakeOver
from rpa_tasks.takeover import leases
from tests.rpa_tasks.browsers.operator_page import OperatorPage, Platform, create_operator
from tests.support.waiting import eventually

Open = Callable[..., OperatorPage]


class RunWithBrowser(NamedTuple):
    """A job of shop s1 that runs, and the browser that it has acquired."""

    pick: Pick
    browser: AcquiredBrowser


def start(shop: Shop, user: User) -> TakeOver:
    return leases.start_take_over(shop.pk, user=user, address="203.0.113.7")


def open_take_over(shop: Shop, open_page: Open) -> tuple[TakeOver, OperatorPage]:
    """Let ann take over the shop. Returns also her page."""
    ann, cookie = create_operator("ann")
    row = start(shop, ann)
    return row, open_page(row, cookie)


def wait_for_end(row: TakeOver) -> str:
    eventually(lambda: TakeOver.objects.get(pk=row.pk).ended_at, "the take-over does not end", within=90)
    return TakeOver.objects.get(pk=row.pk).end


def control(page: OperatorPage, platform: Platform) -> None:
    """Open the platform in the shop's browser and wait for its picture."""
    page.wait(lambda: page.controls and page.state["shown"], "it does not control")
    page.send("go", url=platform.url)
    page.wait(lambda: any(tab["title"] == "店铺后台" for tab in page.state["tabs"]) and page.pictures, "no page")
