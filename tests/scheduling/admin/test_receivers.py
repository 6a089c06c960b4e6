"""The page of receivers, and the same figures by API."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import pytest
import redis
from django.db import connection
from django.test import Client
from django.test.utils import CaptureQueriesContext
from django.utils.timezone import localtime, now
from pytest_django import Settings
from redis import Redis

from scheduling.channels import quota
from scheduling.channels.base import CalendarQuota, Quota
from scheduling.delivery.lanes import LaneLoad, read_receiver_loads, send_lane_report
from scheduling.models import ChannelConfig, Community, Pause, Touch
from scheduling.monitoring import receivers
from scheduling.monitoring.receivers import ReceiverStatus, list_receivers
from tests.support.matrix import MatrixBuilder, RecordEvent

pytestmark = pytest.mark.django_db

Url = Callable[..., str]
ROBOT = "https://oapi.dingtalk.com/robot/send?access_token="


@pytest.fixture(autouse=True)
def server(valkey: redis.Redis, settings: Settings) -> Iterator[Redis]:
    receivers._connect_quotas.cache_clear()
    with Redis.from_url(settings.REDIS_URL, decode_responses=True) as client:
        client.flushall()
        yield client


@pytest.fixture
def robots(matrix: MatrixBuilder) -> Any:
    """A node whose touches go to the robots of two communities."""
    channel = ChannelConfig.objects.create(key="ding", kind="dingtalk", config={}, daily_limit=1_000)
    for number in (1, 2):
        Community.objects.create(
            chat_id=f"c{number}", name=f"群{number}", targets={"dingtalk": {"url": f"{ROBOT}{number}"}}
        )
    return matrix.node(channel=channel)


def defer(touches: list[Any], reason: str = "quota", *, last: timedelta = timedelta(minutes=30)) -> None:
    """Let these touches wait, the last of them for `last`."""
    for number, task_id in enumerate(touches, 1):
        Touch.objects.filter(pk=task_id).update(reason=reason, due_at=now() + last * number / len(touches))


def by_chat() -> dict[str, ReceiverStatus]:
    return {row.chat_id: row for row in list_receivers(0, 50).rows}


def test_receivers_show_what_waits_for_each_robot(robots: Any, record_event: RecordEvent, server: Redis) -> None:
    for chat, count, last in (("c1", 3, 30), ("c2", 2, 90)):
        ids = [record_event(user=f"{chat}-{number}", chat_id=chat).task_ids[0] for number in range(count)]
        defer(ids, last=timedelta(minutes=last))
    record_event(user="ann", chat_id="c1")  # waits for its time, not for the receiver

    found = list_receivers(0, 50)

    assert [(row.chat_id, row.waiting, row.counted_all) for row in found.rows] == [("c2", 2, True), ("c1", 3, True)]
    assert not found.more
    assert not found.incomplete
    row = by_chat()["c1"]
    assert row.rate == pytest.approx(20 / 60)
    assert abs((row.ends_at or now()) - now() - timedelta(minutes=30)) < timedelta(minutes=5)
    assert [use[:3] for use in row.uses] == [("day", 0, 1_000)]
    assert (row.resting_reason, row.in_flight) == ("", 0)


def test_receivers_show_rests_with_reason(
    robots: Any, record_event: RecordEvent, server: Redis, settings: Settings
) -> None:
    defer([record_event(user=f"{chat}-ann", chat_id=chat).task_ids[0] for chat in ("c1", "c2")])
    first, second = (by_chat()[chat].route for chat in ("c1", "c2"))
    assert first
    assert second
    gate = quota.QuotaGate.connect(settings.REDIS_URL)
    gate.throttle(first.vendor_key, timedelta(minutes=10))
    gate.acquire(second.channel.quotas, {second.vendor_key: 20})
    gate.close()

    resting = by_chat()["c1"]
    assert resting.resting_reason == "throttled"
    assert resting.resting_until
    assert resting.resting_until > now() + timedelta(minutes=9)
    assert [use[:3] for use in by_chat()["c2"].uses] == [("day", 20, 1_000)]

    ChannelConfig.objects.update(daily_limit=20)
    used_up = by_chat()["c2"]
    assert used_up.resting_reason == "day"
    assert used_up.resting_until
    assert localtime(used_up.resting_until).strftime("%H:%M:%S") in ("00:00:00", "23:59:59")
    Pause.objects.create(scope="channel:ding")
    paused = by_chat()["c2"]
    assert (paused.resting_reason, paused.resting_until, paused.ends_at) == ("paused", None, None)


def test_receivers_add_reports_of_processes(matrix: MatrixBuilder, record_event: RecordEvent) -> None:
    hook = ChannelConfig.objects.create(key="hook", kind="webhook", config={"url": "https://example.com/in"})
    matrix.node(channel=hook)
    defer([record_event(user=f"user-{number}").task_ids[0] for number in range(4)], "target_busy")
    ((row,), _, _) = list_receivers(0, 50)
    assert row.route
    key = row.route.receiver
    send_lane_report("one:1", [LaneLoad(key, "c9", 200, 90, 40.0, 0.0)])
    send_lane_report("two:2", [LaneLoad(key, "", 100, 6, 10.0, 25.0), LaneLoad(f"{hook.pk}:gone", "", 1, 0, 1.0, 0.0)])
    send_lane_report("three:3", [LaneLoad("999999:other", "", 1, 0, 1.0, 0.0)])

    ((row,), _, _) = list_receivers(0, 50)

    assert (row.channel.key, row.chat_id, row.waiting, row.in_flight) == ("hook", "", 100, 301)
    assert row.rate == pytest.approx(51)
    assert row.resting_reason == "target_down"


def test_lane_report_expires_with_its_process(server: Redis) -> None:
    send_lane_report("one:1", [LaneLoad("1:hook", "", 1, 0, 1.0, 0.0)])
    assert set(read_receiver_loads()) == {"1:hook"}
    assert server.pttl("at:receivers:one:1") <= 10_000
    server.delete("at:receivers:one:1")

    assert read_receiver_loads() == {}
    assert server.smembers("at:receivers") == set()


def test_receivers_beyond_the_count_show_at_least(
    robots: Any, record_event: RecordEvent, viewer: Client, admin_url: Url, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(receivers, "COUNTED_BY_PAGE", 3)
    defer([record_event(user=f"user-{number}", chat_id="c1").task_ids[0] for number in range(5)])

    row = by_chat()["c1"]
    page = viewer.get(admin_url("channelconfig_receivers")).content.decode()

    assert (row.waiting, row.counted_all) == (3, False)
    assert "3+" in page
    assert "not before" in page
    assert "群1" in page


def test_receivers_page_without_redis_shows_what_waits(
    robots: Any, record_event: RecordEvent, viewer: Client, admin_url: Url, settings: Settings
) -> None:
    defer([record_event(user="ann", chat_id="c1").task_ids[0]])
    settings.REDIS_URL = "redis://127.0.0.1:1/0"

    page = viewer.get(admin_url("channelconfig_receivers")).content.decode()

    assert "Redis does not answer" in page
    assert "done at" in page


def test_receivers_page_of_many_robots_is_bounded(
    robots: Any, record_event: RecordEvent, viewer: Client, admin_url: Url
) -> None:
    """300 robots with 20 touches each."""
    Community.objects.bulk_create(
        Community(chat_id=f"m{number}", targets={"dingtalk": {"url": f"{ROBOT}m{number}"}}) for number in range(300)
    )
    (task_id,) = record_event(user="ann", chat_id="c1").task_ids
    with connection.cursor() as cursor:
        cursor.execute("SET LOCAL session_replication_role = replica")
        columns = "event_id, node_id, node_version, customer_id, content_type, counts_toward_cap, priority, paused_by"
        columns += ", attempt, lease_no, wakeups, planned_at, expires_at, created_at"
        cursor.execute(
            f"INSERT INTO scheduling_touch (task_id, root_id, retry_of, state, reason, chat_id, due_at, {columns})"
            " SELECT gen_random_uuid(), gen_random_uuid(), gen_random_uuid(), 'scheduled', 'quota',"
            f" 'm' || mod(number, 300), now() + number * interval '1 second', {columns}"
            " FROM scheduling_touch, generate_series(1, 6000) AS number WHERE task_id = %s",
            [task_id],
        )
    list_receivers(0, 1)  # loads the configuration
    with CaptureQueriesContext(connection) as statements:
        rows = list_receivers(0, 25).rows

    assert [row.waiting for row in rows] == [20] * 25
    assert len(statements) < 12
    assert len(viewer.get(admin_url("channelconfig_receivers")).context["receivers"]) == 25


def test_receivers_api_has_the_same_figures(robots: Any, record_event: RecordEvent, client: Client) -> None:
    from scheduling.operations.commands import create_api_key

    defer([record_event(user=f"{chat}-ann", chat_id=chat).task_ids[0] for chat in ("c1", "c2")])
    headers = {"Authorization": f"Bearer {create_api_key('figures', ['metrics'])}"}

    first = client.get("/api/v1/receivers?limit=1", headers=headers).json()
    second = client.get(f"/api/v1/receivers?limit=1&cursor={first['next']}", headers=headers).json()

    assert {each["items"][0]["chat_id"] for each in (first, second)} == {"c1", "c2"}
    assert second["next"] is None
    item = first["items"][0]
    assert (item["channel"], item["kind"], item["waiting"], item["resting"]) == ("ding", "dingtalk", 1, None)
    assert item["limits"] == [{"period": "day", "used": 0, "limit": 1000}]
    wrong = client.get("/api/v1/receivers?cursor=x", headers=headers)
    assert json.loads(wrong.content)["errors"][0]["field"] == "cursor"


def test_quota_states_show_grants_and_last_slot(server: Redis, settings: Settings) -> None:
    gate = quota.QuotaGate.connect(settings.REDIS_URL)
    quotas = (Quota(5, timedelta(minutes=1)), CalendarQuota(30, "month"))
    gate.reserve(quotas, {("robot", 1): [quota.SlotRequest(timedelta(hours=1))] * 12})
    gate.acquire(quotas, {"robot": 5})
    found, other = gate.read_states([("robot", quotas), ("other", quotas)])
    gate.close()

    assert [use[:3] for use in found.uses] == [("month", 5, 30)]
    assert found.last_slot
    assert timedelta(seconds=60) < found.last_slot <= timedelta(seconds=125)
    assert found.muted == timedelta(0)
    assert ([use[:3] for use in other.uses], other.last_slot) == ([("month", 0, 30)], None)
