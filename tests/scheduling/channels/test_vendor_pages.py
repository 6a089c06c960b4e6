"""The tables of codes in the how-to pages are those of the channels."""

import re
from pathlib import Path

from scheduling.channels.robots import DingTalk, Feishu, WeCom
from scheduling.channels.vendors.sms import AliyunSms, TencentSms
from scheduling.channels.vendors.wechat import MiniProgram, OfficialAccount, WeChatService, WeComApp
from scheduling.durations import format_duration
from tests.support.tables import each_row

PAGES = Path(__file__).parents[3] / "docs/how-to"
ROW = re.compile(r"^\| `([^`]+)` \| [^|]+ \| ([^|]+) \|$", re.MULTILINE)


def describe(refusal, code):
    if refusal.stale_token:
        return "new token, then once more"
    if refusal.unclear:
        return "unknown"
    if refusal.gone:
        return "failed, address disabled"
    if code == "isv.BUSINESS_LIMIT_CONTROL":
        return "retry after 1m, 1h or 1d"
    return f"retry after {format_duration(refusal.retry_after)}" if refusal.retry_after else "failed"


@each_row(
    "kind, page, heading",
    [
        (WeComApp, "send-by-wecom.md", "### wecom_app"), (WeChatService, "send-by-wecom.md", "### wechat_kf"),
        (OfficialAccount, "send-by-wechat.md", "## What the vendor's codes do"),
        (MiniProgram, "send-by-wechat.md", "## What the vendor's codes do"),
        (WeCom, "send-by-robot.md", "### wecom"), (DingTalk, "send-by-robot.md", "### dingtalk"),
        (Feishu, "send-by-robot.md", "### feishu"),
        (AliyunSms, "send-by-sms.md", "### sms_aliyun"), (TencentSms, "send-by-sms.md", "### sms_tencent"),
    ],
)  # fmt: skip
def test_page_lists_each_code_with_its_effect(kind, page, heading):
    part = re.split(r"\n##", (PAGES / page).read_text("utf-8").split(heading, 1)[1])[0]
    assert dict(ROW.findall(part)) == {
        str(code): describe(refusal, str(code)) for code, refusal in kind.refusals.items()
    }
