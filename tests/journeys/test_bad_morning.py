"""A receiver refuses everybody. An operator sees it on the overview, tries five again when it is mended, then the rest,
and edits a rule after a replay; a viewer may look and do none of it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import pytest
from django.db.models.functions import Now

from tests.pictures import picture
from tests.scheduling.core.conftest import _sending  # noqa: F401  a fixture
from tests.scheduling.core.receivers import ScriptedReceiver

pytestmark = [pytest.mark.browser, pytest.mark.django_db(transaction=True)]
MANY, FEW = 58, 5


@pytest.fixture
def refusing(matrix: Any, happen: Callable[..., Any], _sending: None) -> Iterator[ScriptedReceiver]:  # noqa: F811
    """The partner's endpoint refuses what is sent to it; everything else is as on any other day."""
    from scheduling.delivery import deliver, sender
    from scheduling.models import ChannelConfig, FailedTask

    with ScriptedReceiver(script=[400] * MANY) as receiver:
        hook = ChannelConfig.objects.create(
            key="partner", kind="webhook", idempotent=True, config={"url": receiver.url}, timeout=timedelta(seconds=20)
        )
        matrix.node("insale-paid", trigger="order.paid", channel=hook)
        matrix.node("presale-download")
        deliver([task for number in range(40) for task in happen(user=f"reader-{number}").task_ids])
        deliver([task for number in range(MANY) for task in happen("order.paid", user=f"buyer-{number}").task_ids])
        assert sender().drain(60)
        assert FailedTask.objects.filter(channel="partner", state="open").count() == MANY
        yield receiver


def deliver_what_waits() -> None:
    """What a worker does, and its time has come."""
    from django.utils.timezone import now

    from scheduling.delivery import deliver, sender
    from scheduling.models import Touch

    waiting = Touch.objects.filter(state="scheduled")
    waiting.update(due_at=now())
    deliver(list(waiting.values_list("pk", flat=True)))
    assert sender().drain(60)


def delivered_again() -> int:
    from scheduling.models import Touch

    return Touch.objects.filter(state="delivered", retry_of__isnull=False).count()


def advance() -> None:
    """The next batch, and its time has come."""
    from scheduling.bulk import jobs
    from scheduling.models import BulkAction

    BulkAction.objects.update(next_at=Now())
    jobs.advance(BulkAction.objects.get().pk)


def logged_in(chromium: Any, live_server: Any, user: str, password: str) -> Any:
    page = chromium.new_context(locale="zh-CN").new_page()
    page.goto(f"{live_server.url}/admin/")
    page.fill("[name=username]", user)
    page.fill("[name=password]", password)
    page.click("#login-form button[type=submit]")
    page.wait_for_selector("#nav-sidebar-apps", state="attached")
    return page


def test_a_spike_is_found_tried_and_mended(ops: Callable[..., Any], live_server: Any, refusing: Any) -> None:
    from scheduling.models import FailedTask

    page = ops()

    # The overview says what fails most; there they stand by cause.
    assert page.inner_text("tr:has-text('partner') strong") == str(MANY)
    picture(page, "spike", full_page=True)
    page.click("#content a[href$='/failedtask/groups/']")
    page.click("tr:has-text('partner') a[href$='/retry/']")

    # Five first.
    page.fill("[name=reason]", "合作方已恢复")
    page.click("button[name=few]")
    page.wait_for_selector("#replay-tried tbody tr")
    assert page.locator("#replay-tried tbody tr").count() == FEW
    deliver_what_waits()
    page.wait_for_selector("#replay-tried:not([data-live-again])")  # it looks again by itself
    assert page.locator("#replay-tried .at-tag.success").count() == delivered_again() == FEW
    picture(page, "spike-tried")

    # Then the rest, while a page shows how far they are.
    page.fill("[name=reason]", "前五个正常")
    page.fill("[name=per_second]", "10")
    page.click("button[name=rest]")
    page.wait_for_selector("progress")
    advance()
    page.wait_for_selector(f"text=20 / {MANY - FEW}")
    picture(page, "spike-progress")
    advance()
    advance()
    page.wait_for_selector("#bulk-action:not([data-live-again])")
    deliver_what_waits()
    assert delivered_again() == MANY
    assert len(refusing.calls) == 2 * MANY
    assert not FailedTask.objects.filter(state="open").exists()


def test_who_may_only_look_does_none_of_it(chromium: Any, live_server: Any, refusing: Any) -> None:
    from django.contrib.auth.models import Group, User

    from scheduling.management.commands.bootstrap import Command
    from scheduling.models import FailedTask

    Command().grant_permissions()
    User.objects.create_user("vera", password="only looks", is_staff=True).groups.add(Group.objects.get(name="viewer"))
    page = logged_in(chromium, live_server, "vera", "only looks")
    assert page.inner_text("tr:has-text('partner') strong") == str(MANY)
    failed = FailedTask.objects.filter(state="open")[0]
    admin = f"{live_server.url}/admin/scheduling"
    page.goto(f"{admin}/failedtask/groups/")
    assert page.locator("a[href$='/retry/']").count() == 0
    page.goto(f"{admin}/failedtask/")
    assert page.locator("select[name=action] option[value*=retry]").count() == 0
    for path in (f"failedtask/groups/{failed.fingerprint}/retry/", "whatifrun/add/"):
        assert page.goto(f"{admin}/{path}").status == 403, path
    page.context.close()
