"""An automatic roll-out in a browser."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest
from pytest_django.live_server_helper import LiveServer

from tests.support.chromium import OpenPage
from tests.support.matrix import MatrixBuilder
from tests.support.screenshots import save_screenshot

pytestmark = [pytest.mark.browser, pytest.mark.django_db(transaction=True)]


def test_automatic_rollout_starts_pauses_and_shows_moves(
    ops: OpenPage, live_server: LiveServer, matrix: MatrixBuilder
) -> None:
    from scheduling.models import AutomaticRollout, Node, RolloutMove

    node = matrix.node("presale-download", canary_template=matrix.template("guide-v2"))
    page = ops()
    page.goto(f"{live_server.url}/admin/scheduling/node/{node.pk}/change/")
    page.click("#automatic-rollout a.at-primary")
    page.fill("[name=steps]", "10, 30, 100")
    save_screenshot(page, "automatic-rollout-start", full_page=True)
    page.click("button.at-primary")
    page.wait_for_selector("#automatic-rollout [aria-current=step]:has-text('10 %')")
    assert Node.objects.get().canary_percent == 10

    _pause(AutomaticRollout.objects.get())
    moves = RolloutMove.objects.count()
    for name, language, scheme, width in (
        ("automatic-rollout", "zh-hans", "light", 1400),
        ("automatic-rollout-dark-en", "en", "dark", 1400),
        ("automatic-rollout-narrow", "zh-hans", "light", 390),
    ):
        page = ops(language, scheme, width)
        page.goto(f"{live_server.url}/admin/scheduling/node/{node.pk}/change/")
        section = page.locator("#automatic-rollout")
        assert section.locator("tbody").nth(1).locator("tr").count() == moves
        overflow = page.evaluate("document.documentElement.scrollWidth - document.documentElement.clientWidth")
        assert overflow <= 0, (name, overflow)
        save_screenshot(section, name)


def _pause(rollout: Any) -> None:
    """Advance as a pass does, with the statistics of weeks."""
    from scheduling.models import RolloutMove

    calm = {"ended": 2140, "failed": 19, "complained": 9, "opted_out": 24}
    moves = [
        ("grew", "", 30, {"canary": {"ended": 236, "failed": 2, "complained": 1, "opted_out": 3}, "stable": calm}),
        ("paused", "limit:complaints", 0,
         {"canary": {"ended": 512, "failed": 4, "complained": 16, "opted_out": 19}, "stable": calm}),
    ]  # fmt: skip
    for days, (verb, reason, percent, figures) in enumerate(moves, 1):
        at = rollout.started_at + timedelta(days=days)
        RolloutMove.objects.create(
            rollout=rollout, at=at, verb=verb, reason=reason, percent=percent, node_version=2 + days, figures=figures
        )
    rollout.state, rollout.reason, rollout.step, rollout.figures, rollout.judged_at = (
        "paused", "limit:complaints", 1, figures, at
    )  # fmt: skip
    rollout.save()
