"""Fetch the messages of WeChat customer service (微信客服). Its callback only reports that there are some.

Source: developer.work.weixin.qq.com/document/path/94670.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any, NamedTuple

from scheduling.channels.answers import TOKEN_EXPIRED, parse_answer
from scheduling.channels.base import Delivered, Failure, Transient
from scheduling.channels.http_client import close_shared_transport, shared_transport
from scheduling.channels.robots.base import encode_json
from scheduling.channels.vendors.base import JSON_HEADERS, add_query
from scheduling.channels.vendors.callbacks import (
    CallbackResult,
    CustomerMessage,
    VendorReport,
    read_seconds,
    read_uuid,
)

if TYPE_CHECKING:
    from scheduling.channels.vendors.wecom_app import WeChatService

LIMIT, MOST_PAGES = 1_000, 5
LONGEST_SYNC = timedelta(seconds=4)  #: WeCom waits five seconds for the answer
CUSTOMER = 3  #: origin of a message from the customer


class SyncFailed(Exception):
    """Messages are left that could not be fetched. WeCom repeats the callback."""


class SyncedMessages(NamedTuple):
    """What the read pages report."""

    result: CallbackResult
    cursor: str  #: after the last read page; "" if none was read
    problem: str  #: why messages are left, or ""


def sync_messages(channel: WeChatService, token: str, cursor: str) -> SyncedMessages:
    """Return the messages after the cursor. Without one WeCom starts three days ago.

    Pages that were read count although a later one fails: a long backlog would otherwise start from its first page each
    time. The calling thread must not run an event loop.
    """
    return asyncio.run(_fetch_pages(channel, token, cursor))


async def _fetch_pages(channel: WeChatService, token: str, cursor: str) -> SyncedMessages:
    result, reached, access, more = CallbackResult(), "", "", True
    problem = f"more than {MOST_PAGES} pages"
    try:
        async with asyncio.timeout(LONGEST_SYNC.total_seconds()):
            for _ in range(MOST_PAGES):
                access = await channel.get_token(LONGEST_SYNC / 2, "")
                page = await _fetch(channel, access, {"cursor": reached or cursor, "token": token})
                for each in page.get("msg_list") or ():
                    if isinstance(each, Mapping):
                        _read_entry(each, result)
                reached = str(page.get("next_cursor") or reached or cursor)
                more = bool(page.get("has_more"))
                if not more:
                    break
    except (TimeoutError, Failure, SyncFailed) as error:
        problem = str(error) or "no answer within the time limit"
    finally:
        await close_shared_transport()
    return SyncedMessages(result, reached, problem if more else "")


async def _fetch(channel: WeChatService, access: str, asked: Mapping[str, str]) -> Mapping[str, Any]:
    """Fetch one page. A refused access token is replaced once."""
    for attempt in range(2):
        url = add_query(f"{channel.base}/cgi-bin/kf/sync_msg", {"access_token": access})
        document = {**asked, "limit": LIMIT, "open_kfid": channel.settings["open_kfid"]}
        transport = channel._transport or shared_transport()
        response = await transport.request(
            "POST", url, encode_json(document), JSON_HEADERS,
            timeout=LONGEST_SYNC / 2, repeatable=True, proxy=channel.proxy,
        )  # fmt: skip
        outcome = channel.judge(response)
        if isinstance(outcome, Delivered):
            return parse_answer(response)
        if attempt or not isinstance(outcome, Transient) or outcome.reason != TOKEN_EXPIRED:
            raise SyncFailed(outcome.reason)
        access = await channel.get_token(LONGEST_SYNC / 2, access)
    raise SyncFailed


def _read_entry(entry: Mapping[str, Any], result: CallbackResult) -> None:
    now = datetime.now(UTC)
    at = read_seconds(str(entry.get("send_time") or ""), now)
    if entry.get("origin") == CUSTOMER:
        address, message_id = entry.get("external_userid"), entry.get("msgid")
        if (
            isinstance(address, str)
            and isinstance(message_id, str)
            and 0 < len(message_id) <= 200
            and f"{address}{message_id}".isprintable()
        ):
            result.messages.append(CustomerMessage(address, message_id, at))
    event: Any = entry.get("event")
    failed = isinstance(event, Mapping) and event.get("event_type") == "msg_send_fail"
    if failed and (key := read_uuid(event.get("fail_msgid", ""))):
        detail = f"msg_send_fail {event.get('fail_type')}"[:300]
        result.reports.append(VendorReport("bounced", at, key, detail=detail))
