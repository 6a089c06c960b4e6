"""Alerts: passes with a pushed clock, a real robot, real figures."""

import json
import threading
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
from django.conf import settings
from django.db import connection
from django.utils import translation
from django.utils.timezone import now

from rpa_tasks.models import Platform, Shop
from scheduling.channels.quota import QuotaGate, name_quota_keys
from scheduling.configuration import snapshot
from scheduling.delivery.routing import Route, TargetLookup, find_route, load_community_targets
from scheduling.models import Alert, AlertReceiver, AutomaticRollout, ChannelConfig, Community, FailedTask
from scheduling.monitoring import alerts
from scheduling.policy.specs import CustomerSpec
from scheduling.redis_client import connect_redis
from tests.support.thread_servers import serving_in_thread
from tests.support.waiting import eventually

pytestmark = pytest.mark.django_db
BEGAN = datetime(2026, 11, 21, 8, 0, tzinfo=UTC)  #: 16:00 in Shanghai
FULL = {"errcode": 45009, "errmsg": "api freq out of limit"}
DAY = 86400


class Robot(ThreadingHTTPServer):
    """Respond with 200 always, and with the result in the body."""

    daemon_threads = True

    def __init__(self):
        self.verdicts = []  #: of the next requests; then all is taken
        self.taken = []
        self.headers = []
        self.waits = threading.Event()
        self.may_answer = threading.Event()
        self.may_answer.set()
        super().__init__(("127.0.0.1", 0), Answer)

    @property
    def url(self):
        return f"http://127.0.0.1:{self.server_port}/cgi-bin/webhook/send?key=k"

    @property
    def titles(self):
        return [part.splitlines()[0] for text in self.taken for part in text.split("\n\n")]


class Answer(BaseHTTPRequestHandler):
    def do_POST(self):
        robot = self.server
        document = json.loads(self.rfile.read(int(self.headers["content-length"])))
        robot.headers.append(self.headers)
        robot.waits.set()
        robot.may_answer.wait(120)
        verdict = robot.verdicts.pop(0) if robot.verdicts else {"errcode": 0, "errmsg": "ok"}
        if verdict["errcode"] == 0:
            robot.taken.append(document["text"]["content"] if "text" in document else document["data"]["body"])
        body = json.dumps(verdict).encode()
        self.send_response(200)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *args):
        """Discard the log line."""


@pytest.fixture
def robot(settings):
    settings.AFTERTOUCH_ALLOWED_PRIVATE_HOSTS = ["127.0.0.1"]
    settings.AFTERTOUCH_BASE_URL = "https://touch.example.com"
    with Robot() as server, serving_in_thread(server):
        yield server
        server.may_answer.set()


@pytest.fixture
def receiver(robot, valkey, monkeypatch):
    """A group on duty. Only failed tasks count, because no worker runs here."""
    monkeypatch.setattr(alerts, "CONDITIONS", (alerts.BY_KEY["failed"],))
    channel = ChannelConfig.objects.create(key="ops", kind="wecom", timeout=timedelta(seconds=80))
    place = Community.objects.create(chat_id="ops", targets={"ops": {"url": robot.url}})
    return AlertReceiver.objects.create(pk=1, channel=channel, community=place)


@pytest.fixture
def failed():
    """Makes something wrong. Its removal mends it."""
    failed_at = now() - timedelta(days=2, minutes=5)
    return FailedTask.objects.create(origin="touch", failure="failed", reason="x", failed_at=failed_at)


def evaluate_at(*seconds):
    for after in seconds:
        alerts.evaluate_alerts(BEGAN + timedelta(seconds=after))


def test_start_reminder_and_end_are_one_message_each(robot, receiver, failed):
    evaluate_at(0, 30, 59)
    assert robot.taken == []
    evaluate_at(60, 90, 120, DAY)
    (text,) = robot.taken
    assert [line for line in text.splitlines() if "最久" not in line] == [
        "【告警】失败任务长时间无人处理", "自 11-21 16:00:00 起，已持续 1 分钟。",
        "请重新发布、标记处理，或注明原因后忽略。", "https://touch.example.com/admin/scheduling/failedtask/groups/",
    ]  # fmt: skip
    assert "最久的：2 天 5 分钟" in text
    evaluate_at(DAY + 60, DAY + 90)
    assert [part.splitlines()[:2] for part in robot.taken[1:]] == [
        ["【告警】失败任务长时间无人处理", "自 11-21 16:00:00 起，已持续 1 天 1 分钟。"]
    ]
    failed.delete()
    evaluate_at(DAY + 120, DAY + 150, DAY + 180, DAY + 210)
    end = "自 11-21 16:00:00 至 11-22 16:02:00，共 1 天 2 分钟。"
    assert robot.taken[2:] == [f"【已恢复】失败任务长时间无人处理\n{end}"]
    assert not Alert.objects.exists()


def test_short_interruptions_are_not_sent(robot, receiver, failed):
    FailedTask.objects.update(state="ignored")
    for after, state in ((0, "open"), (30, "ignored"), (60, "open"), (90, "open")):
        FailedTask.objects.update(state=state)
        evaluate_at(after)
    assert robot.taken == [], "it held for half a minute"
    evaluate_at(120)
    for after, state in ((150, "ignored"), (180, "open"), (210, "open"), (300, "open")):
        FailedTask.objects.update(state=state)
        evaluate_at(after)
    assert robot.titles == ["【告警】失败任务长时间无人处理"]


def test_refused_message_is_repeated_later(robot, receiver, failed):
    robot.verdicts = [{"errcode": -1, "errmsg": "busy"}, FULL]
    evaluate_at(0, 60, 90)
    assert len(robot.headers) == 1, "it was asked again before its time"
    receiver.refresh_from_db()
    assert receiver.problem.startswith("vendor_-1 企业微信系统繁忙")
    assert receiver.notified_at is None
    clear_quota(receiver)
    evaluate_at(180, 300)
    assert (len(robot.headers), robot.taken) == (2, [])
    clear_quota(receiver)
    evaluate_at(3600, 3630)
    assert (len(robot.headers), len(robot.taken)) == (3, 1)
    receiver.refresh_from_db()
    assert (receiver.problem, receiver.notified_at) == ("", BEGAN + timedelta(hours=1))


def route_of_touch(receiver):
    """Return the route of a touch through the same channel to the same community."""
    chat_id = receiver.community.chat_id
    spec, places = snapshot.channel_spec(receiver.channel), load_community_targets([chat_id])
    route = find_route(spec, CustomerSpec(7, "ann"), chat_id, places, TargetLookup())
    assert isinstance(route, Route)
    return route


def clear_quota(receiver):
    """The time that the vendor named is over."""
    for name in name_quota_keys(route_of_touch(receiver).vendor_key):
        connect_redis(settings.REDIS_URL).delete(name)


def test_quota_exhausted_robot_is_not_called(robot, receiver, failed):
    """The vendor counts all messages, whatever process sent them."""
    channel, _target, _receiver, slot = route_of_touch(receiver)
    assert QuotaGate.connect(settings.REDIS_URL).acquire(channel.quotas, {slot: 20})[slot].granted == 20
    evaluate_at(0, 60)
    receiver.refresh_from_db()
    assert (robot.headers, receiver.problem) == ([], "quota")


@contextmanager
def message_under_way(robot):
    """Run the block while the first message of a pass waits for the answer of the robot."""
    evaluate_at(0)
    robot.may_answer.clear()

    def send_first():
        evaluate_at(60)
        connection.close()

    sending = threading.Thread(target=send_first)
    sending.start()
    assert robot.waits.wait(60)
    yield
    robot.may_answer.set()
    sending.join()


@pytest.mark.django_db(transaction=True)
def test_concurrent_passes_send_one_message(robot, receiver, failed):
    with message_under_way(robot):
        evaluate_at(90, 120)
    evaluate_at(150, 300)
    assert len(robot.headers) == 1


@pytest.mark.django_db(transaction=True)
def test_alert_that_ends_while_its_message_is_under_way_is_resolved(robot, receiver, failed):
    with message_under_way(robot):
        failed.delete()
        evaluate_at(90)
    evaluate_at(120, 150, 180)
    assert robot.titles == ["【告警】失败任务长时间无人处理", "【已恢复】失败任务长时间无人处理"]


def test_crash_after_send_repeats_with_same_key(robot, receiver, failed, monkeypatch):
    """At least once. A receiver that honours the key sees one effect."""
    receiver.channel = ChannelConfig.objects.create(key="hook", kind="webhook", config={"url": robot.url})
    receiver.save()
    evaluate_at(0)
    with monkeypatch.context() as dying:
        dying.setattr(alerts, "settle_message", lambda *_: (_ for _ in ()).throw(SystemExit))
        with pytest.raises(SystemExit):
            evaluate_at(60)
    evaluate_at(120, 180, 210)
    first, second = (headers["webhook-id"] for headers in robot.headers)
    assert first == second


def test_receiver_without_target_keeps_the_alert_and_a_disabled_one_does_not(robot, receiver, failed):
    AlertReceiver.objects.update(community=None)
    evaluate_at(0, 60)
    receiver.refresh_from_db()
    assert receiver.problem.startswith("no_target")
    AlertReceiver.objects.update(community=Community.objects.get())
    evaluate_at(180)
    assert len(robot.taken) == 1

    AlertReceiver.objects.update(enabled=False)
    evaluate_at(DAY + 180, DAY + 240)
    assert len(robot.headers) == 1
    assert not Alert.objects.exists()


def test_conditions_find_what_is_wrong(matrix, valkey, failed):
    """Complaints and eviction have tests of their own."""
    shop = Shop.objects.create(platform=Platform.objects.create(key="pdd"), shop_id="s1")
    Shop.objects.filter(pk=shop.pk).update(login_state="needed", login_lost_at=now())
    valkey.lpush("mq:low", "{}")
    for state in ("running", "withdrawn", "stopped", "finished"):
        canary = matrix.template(f"canary-{state}")
        node = matrix.node(f"node-{state}", canary_template=canary)
        AutomaticRollout.objects.create(node=node, canary=canary, canary_version=1, plan={}, state=state)
    found = eventually(lambda: len(values := alerts.read_values()) == len(alerts.CONDITIONS) and values)
    assert {key: set(values) for key, values in found.items() if values} == {
        "failed": {"touch"}, "login": {"pdd"}, "rollout": {"node-withdrawn"},
        "unattended": {"long", "low", "ticks", "touch.high", "touch.low", "touch.normal"},
    }  # fmt: skip


def test_broker_that_blocks_or_does_not_answer_is_found():
    probe = alerts.BY_KEY["broker_blocked"].probe
    answer = {"celery_queue_length": []}
    assert probe({**answer, "aftertouch_broker_blocked": [({}, 0.0)]}) == {"": 0.0}
    assert probe({**answer, "aftertouch_broker_blocked": []}) == {"": 0.0}
    assert probe({**answer, "aftertouch_broker_blocked": [({}, 1.0)]}) == {"": 1.0}
    assert probe({}) == {"": 1.0}


def test_installation_without_live_chats_needs_no_watcher():
    samples = {"aftertouch_watchers": [({}, 0.0)], "aftertouch_sessions": []}
    probe = alerts.BY_KEY["no_watcher"].probe
    assert probe(samples) == {"": 0.0}
    samples["aftertouch_sessions"] = [({"state": "armed"}, 2.0), ({"state": "paused"}, 1.0)]
    assert probe(samples) == {"": 2.0}
    assert probe({**samples, "aftertouch_watchers": [({}, 1.0)]}) == {"": 0.0}
    assert probe({}) == {"": 1.0}, "Redis does not answer, so no silence is detected"


def test_every_condition_has_text_and_page_link(robot):
    """In both languages, with many subjects, in one message."""
    rows = [
        Alert(condition=key, subject=f"q{number}", value=100, since=BEGAN, message_at=BEGAN, ended_at=ended_at)
        for key in alerts.BY_KEY
        for number in range(20)
        for ended_at in (None, BEGAN)
    ]
    for language in ("zh-hans", "en"):
        with translation.override(language):
            subject, body = alerts.compose_message(rows, BEGAN + timedelta(hours=3))
        assert "%(" not in subject + body
        assert body.count("https://touch.example.com/admin/") == len(alerts.BY_KEY)
        assert "q0" in body
        assert "(+12)" in body
        assert "q9" not in body
