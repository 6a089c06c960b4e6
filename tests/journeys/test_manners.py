"""Limits offers, holds customers out of all nodes, and reads in the preview when and why a message is sent."""

from datetime import time, timedelta

from tests.support.screenshots import save_screenshot


def test_rules_and_holdout_are_edited_and_previewed(ops, matrix):
    from scheduling.models import HarassmentRule, Holdout

    Holdout.objects.create(pk=1)
    matrix.node("offer", delay=timedelta(hours=1), at=time(10), at_day="next_working", tags=["sale"])
    matrix.node("receipt", guard_holdout="ignore")
    admin = "/admin/scheduling"
    page = ops()
    page.goto(f"{admin}/harassmentrule/add/")
    page.select_option("[name=kind]", "cap")
    for name, value in (("limit", "1"), ("limits", "vip=2"), ("window", "7d"), ("tag", "sale"), ("channel", "fax")):
        page.fill(f"[name={name}]", value)
    page.click("[name=_save]")
    page.wait_for_selector(".errorlist :text('fax')")
    page.fill("[name=channel]", "")
    save_screenshot(page, "rule-of-a-part")
    page.click("[name=_save]")
    page.wait_for_selector("text=vip=2")
    rule = HarassmentRule.objects.latest("pk")
    assert (rule.limit, rule.limits, rule.tag, rule.channel) == (1, {"vip": 2}, "sale", "")

    page.click("#nav-sidebar-apps >> text=规则")
    page.click(".at-tabs >> text=全局对照组")
    page.fill("[name=percent]", "100")
    page.click("[name=_save]")
    page.wait_for_selector(":text('成功')")
    assert Holdout.objects.get().percent == 100
    page.goto(f"{admin}/event/preview/?type=material.downloaded&user_id=ann")
    offer, receipt = page.locator("section.at-outcome").all_inner_texts()
    assert "全局对照组" in offer
    assert "下一个工作日" in offer
    assert "全局对照组" not in receipt
    save_screenshot(page, "preview-of-holdout")
