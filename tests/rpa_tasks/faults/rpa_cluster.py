"""A stack without a node of its own, nodes beside it that a test may kill, and desks where jobs are published."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from uuid import uuid4

import psutil
from psycopg.rows import dict_row

from config.environment import ROOT
from config.local.processes import is_alive, processes_with_variable
from tests.faults.workers import Program, worker
from tests.rpa_tasks.faults.effect_log import Effect, EffectLog
from tests.support.stack import StackUnderTest, run_stack
from tests.support.waiting import WAIT_LIMIT

ACT = ["{python}", "-I", str(Path(__file__).with_name("logging_command.py")), "{param}"]
TIERS = "high,normal,low"
#: Times of a node whose leases no fault ends: a process of a loaded machine may stall for a minute.
PATIENT = {"LEASE": 600.0, "EXTENSION": 500.0}
ENDS = ("succeeded", "cancelled", "failed", "unknown")


@dataclass
class PublisherProcess:
    process: subprocess.Popen[str]

    def send(self, orders: Sequence[tuple[str, Mapping[str, Any]]]) -> None:
        assert self.process.stdin
        self.process.stdin.write(json.dumps(orders) + "\n")
        self.process.stdin.flush()

    def receive(self) -> list[Any]:
        assert self.process.stdout
        line = self.process.stdout.readline()
        assert line, "the desk has closed"
        return list(json.loads(line))

    def ask(self, *orders: tuple[str, Mapping[str, Any]]) -> list[Any]:
        self.send(orders)
        return self.receive()


@contextmanager
def run_publisher(environment: Mapping[str, str]) -> Iterator[PublisherProcess]:
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.rpa_tasks.faults.publisher_process"],
        cwd=ROOT, env=dict(environment), text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        start_new_session=True,
    )  # fmt: skip
    with process:
        try:
            yield PublisherProcess(process)
        finally:
            process.kill()


@dataclass
class Node:
    name: str
    program: Program
    state_dir: Path

    def children(self) -> list[psutil.Process]:
        """The processes that run jobs."""
        return [child for child in self._main.children() if "celery" in " ".join(child.cmdline())]

    def family(self) -> list[psutil.Process]:
        """The worker: its main process and those that run jobs. Not the guards."""
        return [self._main, *self.children()]

    @property
    def _main(self) -> psutil.Process:
        return psutil.Process(self.program.pid)

    def log(self, text: str) -> int:
        """Count the text in the worker's log."""
        return self.program.log.count(text)


@dataclass
class RpaCluster(StackUnderTest):
    folder: Path
    publisher: PublisherProcess
    environment: dict[str, str] = field(repr=False)

    wait_limit = WAIT_LIMIT
    row_factory = staticmethod(dict_row)

    # --- the database ---------------------------------------------------------------------------------------------

    def job(self, task: str) -> dict[str, Any]:
        return self.sql("SELECT * FROM rpa_tasks_job WHERE task_id = %s", [task])[0]

    def runs(self, task: str) -> list[dict[str, Any]]:
        return self.sql("SELECT * FROM rpa_tasks_run WHERE job_id = %s ORDER BY id", [task])

    def failed_tasks(self, task: str) -> list[dict[str, Any]]:
        return self.sql("SELECT * FROM scheduling_failedtask WHERE task_id = %s", [task])

    def unsettled(self, tasks: Sequence[str]) -> int:
        return int(
            self.sql(
                "SELECT count(*) FROM rpa_tasks_job WHERE task_id = ANY(%s::uuid[]) AND NOT state = ANY(%s)",
                [list(tasks), list(ENDS)],
            )[0]["count"]
        )

    def expire_leases(self, *tasks: str) -> None:
        """Let the leases of dead or stopped holders be over now: their minute is what tests do not wait for."""
        self.sql(
            "UPDATE rpa_tasks_job SET lease_until = clock_timestamp() - interval '1 ms'"
            " WHERE state = 'running' AND task_id = ANY(%s::uuid[])",
            [list(tasks)],
        )

    # --- waiting --------------------------------------------------------------------------------------------------

    def await_state(self, task: str, *states: str, timeout: float = WAIT_LIMIT) -> dict[str, Any]:
        self.wait(lambda: self.job(task)["state"] in states, f"job {task} is {' or '.join(states)}", timeout)
        return self.job(task)

    def await_effects(self, log: EffectLog, tasks: Sequence[str], count: int = 1, **wait: Any) -> list[Effect]:
        """Return the effect number `count` of each task, once all of them exist."""
        self.wait(lambda: all(len(log.of(task)) >= count for task in tasks), f"run {count} of {tasks}", **wait)
        return [log.of(task)[count - 1] for task in tasks]

    def await_end_of_commands(self, *tasks: str, timeout: float = WAIT_LIMIT) -> None:
        """No process of these jobs is left, wherever it hides."""
        self.wait(
            lambda: not any(self.list_running_commands(task) for task in tasks),
            "their processes are gone",
            timeout,
            0.2,  # a look reads the environment of each process of the machine
        )

    def commands_left(self) -> list[psutil.Process]:
        """Processes that carry the marks of a run of any node."""
        nodes = str(self.folder / "nodes")
        found = []
        for process in psutil.process_iter():
            with suppress(psutil.Error, OSError):
                marks = process.environ()
                if "AFTERTOUCH_TASK_ID" in marks and marks.get("AFTERTOUCH_STATE_DIR", "").startswith(nodes):
                    found.append(process)
        return [process for process in found if is_alive(process)]

    def list_running_commands(self, task: str) -> list[psutil.Process]:
        return [process for process in processes_with_variable("AFTERTOUCH_TASK_ID", task) if is_alive(process)]

    def log_files(self) -> list[Path]:
        return [self.stack.state_dir / "logs" / "core.log", *sorted(self.folder.glob("nodes/*/logs/*.log"))]

    # --- what a test needs ----------------------------------------------------------------------------------------

    def market(self, shops: int = 1, **flows: Mapping[str, Any]) -> Market:
        """A platform of its own, with shops and with flows by task type."""
        key = f"m{uuid4().hex[:8]}"
        names = [f"{key}-{number}" for number in range(shops)]
        plain = {"platform": key, "command": ACT, "retry_delays": [0.2, 0.2, 0.2], "environment": ["DATABASE_URL"]}
        orders: list[tuple[str, Mapping[str, Any]]] = [("platform", {"key": key})]
        orders += [("shop", {"platform": key, "shop_id": name}) for name in names]
        orders += [("flow", {**plain, "task_type": name, **flow}) for name, flow in flows.items()]
        self.publisher.ask(*orders)
        folder = self.folder / key
        folder.mkdir()
        return Market(self, key, names, folder, EffectLog(folder / "effects"))

    @contextmanager
    def node(
        self, name: str, *words: str, slots: int = 2, queues: str = TIERS,
        env: Mapping[str, str] | None = None, times: Mapping[str, float] | None = None,
        ready: bool = True,
    ) -> Iterator[Node]:  # fmt: skip
        """An execution node: a worker with a state directory of its own. With `ready=False` it is not waited for."""
        state_dir = self.folder / "nodes" / name
        state_dir.mkdir(parents=True, exist_ok=True)
        environment = {
            **self.environment,
            "AFTERTOUCH_NODE": name,
            "AFTERTOUCH_STATE_DIR": str(state_dir),
            "AFTERTOUCH_RPA_SLOTS": str(slots),
            "AFTERTOUCH_RPA_WARM_BROWSERS": "0",
            "FAULTS_TIMES": json.dumps(times or {}),
            **(env or {}),
        }
        words = ("-Q", queues, "-c", str(slots), "-n", f"{name}@%h", *words)
        app = "tests.rpa_tasks.faults.short_timeouts_app" if times else "config"
        with worker(environment, *words, app=app, log=name) as program:
            node = Node(name, program, state_dir)
            if ready:
                program.await_ready()
            yield node
            if program.is_alive():
                program.kill()  # nothing is left of it whatever its end, and this one is quick


@dataclass
class Market:
    cluster: RpaCluster
    platform: str
    shops: list[str]
    folder: Path
    log: EffectLog

    def order(self, shop: str, task_type: str, **changes: Any) -> tuple[str, dict[str, Any]]:
        payload = {"log": str(self.log.path)} | changes.pop("payload", {})
        asked = {"platform": self.platform, "shop_id": shop, "task_type": task_type, "payload": payload}
        return "publish", asked | changes

    def publish(self, shop: str, task_type: str, **changes: Any) -> str:
        """The id of the job."""
        ((answer),) = self.cluster.publisher.ask(self.order(shop, task_type, **changes))
        assert "task" in answer, answer
        return str(answer["task"])


@contextmanager
def run_rpa_cluster(
    folder: Path, programs: Sequence[str] = ("core", "ticks", "beat"), env: Mapping[str, str] | None = None
) -> Iterator[RpaCluster]:
    with run_stack(folder / "stack", programs, env, concurrency=1) as stack:
        found = stack.endpoints
        environment = {**stack.environment, "DATABASE_URL": found.database_url, "REDIS_URL": found.redis_url}
        with run_publisher(environment) as at:
            yield RpaCluster(stack, folder, at, environment)
