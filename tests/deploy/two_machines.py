"""Two machines on one PostgreSQL and one Valkey, each with programs from a checkout of its own, both under load."""

from __future__ import annotations

import json
import re
import threading
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from config.environment import ROOT
from config.local import servers
from config.local.isolated import RunningStack, stack_environment
from tests.deploy.machine import UNITS, Machine
from tests.faults.fault_stack import FaultStack, Run, configuration
from tests.faults.load import SLOW_RECEIVERS
from tests.faults.receiver import EffectReceiver
from tests.support.waiting import WAIT_LIMIT

ACT = ROOT / "tests" / "rpa_tasks" / "faults" / "logging_command.py"
SHOPS = 6
COMPLAINTS = re.compile(
    r"does not exist|Violation|Undefined(Column|Table)|(Programming|Integrity|Import|ModuleNotFound|Attribute)Error"
)


class Jobs:
    """`with Jobs(…)`: jobs for robots, one after the other, repeated until they are accepted."""

    def __init__(self, host: str, api_key: str, effects: Path) -> None:
        self.host, self.effects = host, effects
        self.headers = {"Authorization": f"Bearer {api_key}", "Content-Type": "application/json"}
        self.accepted: set[str] = set()
        self._ending = threading.Event()
        self._thread = threading.Thread(target=self._send, daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ending.set()
        self._thread.join(60)

    def noted(self) -> list[dict[str, Any]]:
        """What the runs themselves wrote down."""
        return [json.loads(line) for line in self.effects.read_text().splitlines()]

    def _send(self) -> None:
        number = 0
        while not self._ending.wait(0.4):
            with suppress(OSError):
                self._publish(number)
                number += 1

    def _publish(self, number: int) -> None:
        order = {
            "platform": "up", "shop_id": f"s{number % SHOPS}", "task_type": "act", "dedupe_key": f"job-{number}",
            "payload": {"log": str(self.effects), "hold": 0.3},
        }  # fmt: skip
        url = f"{self.host}/api/v1/rpa/jobs"
        request = urllib.request.Request(url, json.dumps(order).encode(), self.headers)
        with urllib.request.urlopen(request, timeout=15) as answer:
            self.accepted.add(json.load(answer)["task_id"])


@dataclass
class TwoMachines:
    folder: Path
    receiver: EffectReceiver
    old: Machine
    new: Machine
    api_key: str = ""

    def await_start(self) -> None:
        """As the old version would: tables, configuration, a key, programs."""
        self.old.manage("migrate", "--verbosity", "0")
        file = self.folder / "fleet.yaml"
        file.write_text(json.dumps({**configuration(self.receiver), **ROBOTS}))
        self.old.manage("apply_config", str(file))
        self.api_key = self.old.manage("create_api_key", "up", "--scope", "events", "--scope", "rpa").split()[-1]
        self.old.start(*UNITS)
        self.target_of(self.old).sql(DEAF_ONES, [SLOW_RECEIVERS - 1])

    def target_of(self, machine: Machine) -> FaultStack:
        """What the loads of faults know of it."""
        stack = RunningStack(self.folder, machine.base_url, "", machine.environment)
        return FaultStack(stack, self.receiver, api_key=self.api_key)

    def migrate(self, run: Run) -> tuple[float, float]:
        """Upgrade under load. Return the duration in seconds and the slowest 202 of that time."""
        began = time.time()
        self.new.manage("migrate", "--verbosity", "0")
        ended = time.time()
        run.send_load(5)
        slow = [each.took for each in run.load.accepted if each.at > began and each.at - each.took < ended]
        return ended - began, max(slow, default=0.0)

    def await_work_of_both(self) -> None:
        """Workers of both kinds take messages and jobs."""
        before = self._done()
        self.target_of(self.old).wait(
            lambda: all(now > then for now, then in zip(self._done(), before, strict=True)),
            f"both kinds take work, {before}", WAIT_LIMIT,
        )  # fmt: skip

    def _done(self) -> list[int]:
        cores = [machine.log("core").count("Task scheduling.deliver[") for machine in (self.old, self.new)]
        runs = dict(self.target_of(self.old).sql("SELECT node, count(*) FROM rpa_tasks_run GROUP BY node"))
        return [*cores, runs.get(self.old.name, 0), runs.get(self.new.name, 0)]

    def problems(self, jobs: Jobs) -> list[str]:
        """Of jobs, of what was failed, of what the logs complain about. Those of touches are the loads' own."""
        failed = self.target_of(self.old).sql(
            "SELECT reason, detail FROM scheduling_failedtask WHERE origin <> 'touch'"
        )
        return [*self._of_jobs(jobs), *(f"failed: {row}" for row in failed), *self._complaints()]

    def _of_jobs(self, jobs: Jobs) -> list[str]:
        target = self.target_of(self.old)
        target.wait(lambda: not target.sql(WAITING_JOBS)[0][0], "all jobs end")
        states, noted = dict(target.sql("SELECT task_id::text, state FROM rpa_tasks_job")), jobs.noted()
        done = {each["task"] for each in noted if each["what"] == "ended"}
        return [
            *(f"accepted and lost: job {task}" for task in jobs.accepted - states.keys()),
            *(f"job {task} is {state}" for task, state in states.items() if state != "succeeded"),
            *(f"never done: job {task}" for task in states.keys() - done),
            *(f"two of a shop at once: {each}" for each in noted if each.get("met")),
        ]

    def _complaints(self) -> Iterator[str]:
        for path in (self.folder / "logs").glob("*.log"):
            lines = [line for line in path.read_text(errors="replace").splitlines() if COMPLAINTS.search(line)]
            yield from (f"{path.name}: {line[:400]}" for line in lines[:3])


@contextmanager
def run_two_machines(folder: Path, old: Path, new: Path) -> Iterator[TwoMachines]:
    (folder / "logs").mkdir()
    found = servers.start_servers(folder / "servers")
    made: list[Machine] = []
    try:
        with EffectReceiver() as receiver:
            ours = {
                "DATABASE_URL": found.database_url, "REDIS_URL": found.redis_url,
                "DJANGO_SETTINGS_MODULE": "config.settings.test", "AFTERTOUCH_ALLOWED_PRIVATE_HOSTS": receiver.address,
            }  # fmt: skip
            for name, tree in (("old", old), ("new", new)):
                (folder / name).mkdir(mode=0o700)
                made.append(Machine(name, tree, folder / name, stack_environment(ours, folder / name)))
            yield TwoMachines(folder, receiver, *made)
    finally:
        for machine in made:
            machine.end()
        servers.stop_servers(folder / "servers")


ROBOTS = {
    "platforms": [{"key": "up", "name": "up"}],
    "flows": [
        {
            "platform": "up", "task_type": "act", "command": ["{python}", "-I", str(ACT), "{param}"],
            "timeout": "60s", "idempotent": True, "needs_browser": False,
        }
    ],
    "shops": [{"platform": "up", "shop_id": f"s{number}", "name": f"s{number}"} for number in range(SHOPS)],
}  # fmt: skip
DEAF_ONES = """
INSERT INTO scheduling_customer (user_id, name, level, locale, timezone, addresses, opted_out, created_at)
SELECT 'deaf-' || n, '', '', '', '', '{}', true, now() FROM generate_series(0, %s) AS n
"""
WAITING_JOBS = "SELECT count(*) FROM rpa_tasks_job WHERE state IN ('scheduled', 'queued', 'running')"
