"""A real stack keeps its promises once each. The faults in all their kinds are those of `make faults`."""

import json
import os
import signal

import psutil
import pytest
import redis

from config.environment import ROOT
from config.local.processes import wait_until
from examples.demo import demo_shop
from tests.faults.receiver import EffectReceiver
from tests.support.chromium import find_chromium
from tests.support.small_matrix import small_matrix
from tests.support.stack import StackUnderTest, cloud_event, run_stack

PROGRAMS = ("web", "core", "ticks", "execution", "beat")


class SmokeStack(StackUnderTest):
    wait_limit = 240.0

    def publish(self, configuration):
        headers = {"If-Match": "*", "Content-Type": "application/yaml"}
        assert self.call("PUT", "/api/v1/config?reason=smoke", configuration, **headers)["stored"]

    def send_event(self, name):
        assert self.call("POST", "/api/v1/events", cloud_event(name, "smoke.step", f"ann-{name}"))["touches"]

    def await_delivered(self, name):
        """Wait until the touch of this event is delivered, and check that the receiver saw one message."""
        self.wait(lambda: self.state_of(name) == ["delivered"], f"{name} is delivered")
        assert len(self.receiver.calls_of(name)) == 1

    def state_of(self, name):
        rows = self.sql(
            "SELECT t.state FROM scheduling_touch AS t JOIN scheduling_event AS e ON e.id = t.event_id"
            " WHERE e.event_id = %s",
            [name],
        )
        return [state for (state,) in rows]


@pytest.fixture(scope="module")
def smoke(state_folder):
    with EffectReceiver((0, 0)) as receiver:
        env = {"AFTERTOUCH_ALLOWED_PRIVATE_HOSTS": receiver.address, "AFTERTOUCH_RPA_SLOTS": "1"}
        with run_stack(state_folder("smoke"), PROGRAMS, env, migrated=False) as stack:
            made = SmokeStack(stack)
            made.receiver = receiver
            made.create_api_key("events", "config.write", "rpa", "rpa.configure", "rpa.commands")
            node = {"key": "step", "trigger": "smoke.step", "delay": "1s"}
            made.publish(json.dumps(small_matrix(receiver.channel(retry=["1s"] * 5), node)).encode())
            yield made


def test_event_is_delivered_once(smoke):
    smoke.send_event("first")
    smoke.await_delivered("first")
    assert smoke.receiver.forged == 0


def test_killed_worker_delivers_after_its_restart(smoke):
    """All processes of the worker die in the middle of a call. Its lease of 45 s is the one wait that is shortened."""
    smoke.receiver.close()
    smoke.send_event("killed")
    smoke.wait(lambda: smoke.receiver.held == 1, "the call has arrived")
    main = psutil.Process(smoke.stack.pids["core"])
    for process in [main, *main.children(recursive=True)]:
        os.kill(process.pid, signal.SIGKILL)
    smoke.receiver.open()
    smoke.wait(lambda: smoke.stack.pids.get("core", main.pid) != main.pid, "the worker runs again")
    smoke.sql("UPDATE scheduling_touch SET lease_until = clock_timestamp() WHERE state IN ('queued', 'running')")
    smoke.await_delivered("killed")


def test_flushed_redis_loses_no_touch(smoke):
    smoke.send_event("flushed")
    with redis.Redis.from_url(smoke.stack.endpoints.redis_url) as client:
        client.flushall()
    # A lost wake-up is sent again when the lease of its dispatch is over.
    smoke.sql("UPDATE scheduling_touch SET lease_until = clock_timestamp() WHERE state = 'queued'")
    smoke.await_delivered("flushed")


def test_job_runs_in_a_real_browser(smoke):
    find_chromium()
    smoke.publish((ROOT / "examples" / "demo_shop" / "shops.yaml").read_bytes())
    with demo_shop() as site:
        job = {
            "platform": "demo", "shop_id": "s1", "task_type": "sync_order", "priority": "high",
            "payload": {"site": site, "login": True},
        }  # fmt: skip
        task = smoke.call("POST", "/api/v1/rpa/jobs", job)["task_id"]
        ended = {}

        def has_ended():
            ended.update(smoke.call("GET", f"/api/v1/rpa/jobs/{task}"))
            return ended["state"] in ("succeeded", "failed", "unknown", "cancelled")

        assert wait_until(has_ended, smoke.wait_limit), smoke.logs()
    assert (ended["state"], ended["result"]["read"] > 0) == ("succeeded", True), ended
