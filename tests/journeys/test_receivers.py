"""The page of receivers, in a browser."""

from datetime import timedelta

from django.conf import settings
from django.utils.timezone import now

from tests.journeys.conftest import visit_layouts
from tests.support.screenshots import save_screenshot


def test_receivers_page_shows_rests_and_fits(ops, matrix, record_event, valkey):
    from scheduling.channels.quota import QuotaGate
    from scheduling.delivery.lanes import LaneLoad, send_lane_report
    from scheduling.models import ChannelConfig, Community, Pause, Touch
    from scheduling.monitoring.receivers import list_receivers

    ding = ChannelConfig.objects.create(key="dingtalk-groups", kind="dingtalk", config={}, daily_limit=500)
    hook = ChannelConfig.objects.create(key="crm-hook", kind="webhook", config={"url": "https://example.com/in"})
    feishu = ChannelConfig.objects.create(key="feishu-paused", kind="feishu", config={})
    robot = "https://oapi.dingtalk.com/robot/send?access_token="
    for number, name in enumerate(("浦东宝妈一群", "静安福利群"), 1):
        Community.objects.create(chat_id=f"c{number}", name=name, targets={"dingtalk": {"url": f"{robot}{number}"}})
    lark = "https://open.feishu.cn/open-apis/bot/v2/hook/x"
    Community.objects.create(chat_id="c3", name="售后群", targets={"feishu": {"url": lark}})
    for key, channel, chat, count, reason in (
        ("ding", ding, "c1", 40, "quota"), ("ding2", ding, "c2", 25, "quota"), ("crm", hook, "", 60, "target_down"),
        ("lark", feishu, "c3", 5, "quota"),
    ):  # fmt: skip
        matrix.node(key, trigger=key, channel=channel)
        for number in range(count):
            (task_id,) = record_event(key, f"{key}-{number}", chat_id=chat).task_ids
            Touch.objects.filter(pk=task_id).update(reason=reason, due_at=now() + timedelta(minutes=number))
    Pause.objects.create(scope="channel:feishu-paused", reason="机器人升级")
    rows = {row.channel.key + row.chat_id: row for row in list_receivers(0, 20).rows}
    gate = QuotaGate.connect(settings.REDIS_URL)
    gate.throttle(rows["dingtalk-groupsc2"].route.vendor_key, timedelta(minutes=10))
    gate.acquire(rows["dingtalk-groupsc1"].route.channel.quotas, {rows["dingtalk-groupsc1"].route.vendor_key: 20})
    gate.close()
    send_lane_report("one:1", [LaneLoad(rows["crm-hook"].route.receiver, "", 0, 12, 40.0, 120.0)])
    for name, language, scheme in (("receivers", "zh-hans", "light"), ("receivers-dark-en", "en", "dark")):
        send_lane_report("one:1", [LaneLoad(rows["crm-hook"].route.receiver, "", 0, 12, 40.0, 120.0)])
        page = ops(language, scheme)
        for look in visit_layouts(page, "/admin/scheduling/channelconfig/receivers/"):
            assert page.locator("td:has-text('静安福利群')").count() == 1
            assert page.locator(".at-receivers tbody tr").count() == 4
            save_screenshot(page, f"{name}{look}")
