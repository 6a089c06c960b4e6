"""An automatic roll-out in a browser."""

from django.utils.timezone import now

from tests.journeys.conftest import visit_layouts
from tests.support.screenshots import save_screenshot


def test_automatic_rollout_starts_and_shows_a_withdrawn_canary(ops, matrix):
    from scheduling.models import AutomaticRollout, Node

    node = matrix.node("presale-download", canary_template=matrix.template("guide-v2"))
    page = ops()
    page.goto(f"/admin/scheduling/node/{node.pk}/change/")
    page.click("#automatic-rollout a.at-primary")
    page.fill("[name=steps]", "10, 30, 100")
    save_screenshot(page, "automatic-rollout-start", full_page=True)
    page.click("button.at-primary")
    page.wait_for_selector("#automatic-rollout [aria-current=step]:has-text('10 %')")
    assert Node.objects.get().canary_percent == 10

    AutomaticRollout.objects.update(
        state="withdrawn", reason="complaints", step=1, ended=512, failed=4, complained=16, judged_at=now()
    )
    Node.objects.update(canary_percent=0)
    page = ops()
    for look in visit_layouts(page, f"/admin/scheduling/node/{node.pk}/change/"):
        section = page.locator("#automatic-rollout")
        assert section.locator(".at-note.bad").count() == 1
        save_screenshot(section, f"automatic-rollout{look}")
