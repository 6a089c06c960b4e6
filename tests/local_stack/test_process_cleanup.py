"""A run of the demo, of the benchmarks or of a stack leaves no process, however it ends."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from benchmarks.nginx import find_nginx
from config.environment import ROOT
from config.local.processes import is_alive, wait_until
from tests.support.waiting import WAIT_LIMIT


@pytest.fixture
def folder() -> Iterator[Path]:
    """Where the run has its state and its temporary files. PostgreSQL runs under another account if we are root."""
    made = Path(tempfile.mkdtemp(prefix="run-"))
    made.chmod(0o755)
    yield made
    shutil.rmtree(made, ignore_errors=True)


@pytest.fixture
def start_run(folder: Path) -> Iterator[Callable[..., subprocess.Popen[bytes]]]:
    """Start a run in a process group of its own, as a shell does. A script's job in the background ignores SIGINT."""
    started: list[subprocess.Popen[bytes]] = []

    def start_run(*words: str, **env: str) -> subprocess.Popen[bytes]:
        ours = {name: value for name, value in os.environ.items() if not name.startswith(("PYTEST_", "AFTERTOUCH_"))}
        ours |= {"TMPDIR": str(folder), "AFTERTOUCH_STATE_DIR": str(folder / "state"), **env}
        with (folder / "output").open("wb") as output:
            started.append(
                subprocess.Popen(
                    [sys.executable, "-m", *words],
                    cwd=ROOT,
                    env=ours,
                    stdout=output,
                    stderr=output,
                    start_new_session=True,
                    preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
                )
            )
        return started[-1]

    yield start_run
    for run in started:
        run.kill()
        run.wait()


def processes_of(folder: Path) -> list[str]:
    """All that name the folder in their command line or their environment."""
    found = []
    for process in psutil.process_iter():
        try:
            words = [*process.cmdline(), *process.environ().values()]
            if any(str(folder) in word for word in words) and is_alive(process):
                found.append(" ".join(process.cmdline()))
        except (psutil.Error, OSError):
            continue
    return found


def signal_run(run: subprocess.Popen[bytes], number: signal.Signals) -> None:
    """As Ctrl-C does: to the whole group. Any other signal goes to the process that `make` started."""
    if number == signal.SIGINT:
        os.killpg(run.pid, number)
    else:
        run.send_signal(number)


def check_all_ended(run: subprocess.Popen[bytes], folder: Path) -> None:
    run.wait(WAIT_LIMIT)
    wait_until(lambda: not processes_of(folder), WAIT_LIMIT, pause=0.2)
    assert processes_of(folder) == []


DEMO = (["examples.demo"], "aftertouch-*/logs/core.log")
BENCH = (["benchmarks", "burst", "--quick"], "*/logs/01-celery.log")


@pytest.mark.parametrize(
    ("words", "moment", "number"),
    [(*DEMO, signal.SIGINT), (*BENCH, signal.SIGKILL)],
    ids=["demo-SIGINT", "bench-SIGKILL"],
)
def test_demo_or_benchmark_ended_by_signal_leaves_no_process(
    folder: Path,
    start_run: Callable[..., subprocess.Popen[bytes]],
    words: list[str],
    moment: str,
    number: signal.Signals,
) -> None:
    if words == BENCH[0] and find_nginx() is None:
        pytest.skip("missing service: nginx")
    run = start_run(*words)
    assert wait_until(lambda: any(folder.glob(moment)), WAIT_LIMIT), (folder / "output").read_text()
    assert len(processes_of(folder)) >= 3
    signal_run(run, number)
    check_all_ended(run, folder)
    if number != signal.SIGKILL:
        assert not any(folder.glob("aftertouch-*")), "its temporary folder is still there"


#: Two shops. The command of one is returned when its node stops; that of the other runs until its worker is killed.
DEAF_JOBS = """
from rpa_tasks.jobs.publish import PublishRequest, publish_job
from rpa_tasks.models import Flow, Platform, Shop
platform = Platform.objects.create(key="p")
deaf = ["/bin/sh", "-c", "trap '' TERM; : > deaf; while :; do sleep 1; done", "{param}"]
for name in ("waits", "stays"):
    Shop.objects.create(platform=platform, shop_id=name)
    Flow.objects.create(
        platform=platform, task_type=name, command=deaf, needs_browser=True, idempotent=name == "waits"
    )
    publish_job(PublishRequest(platform="p", shop_id=name, task_type=name))
"""


def test_stack_with_deaf_browser_jobs_leaves_no_process(
    folder: Path, start_run: Callable[..., subprocess.Popen[bytes]]
) -> None:
    state = folder / "state"
    run = start_run("config.local", "run", "execution", "ticks", "beat", AFTERTOUCH_RPA_SLOTS="2")
    assert wait_until((state / "stack.json").exists, WAIT_LIMIT), (folder / "output").read_text()
    subprocess.run(
        [sys.executable, "manage.py", "shell", "--no-imports", "-c", DEAF_JOBS],
        cwd=ROOT, env={**os.environ, "AFTERTOUCH_STATE_DIR": str(state)}, check=True, timeout=WAIT_LIMIT,
    )  # fmt: skip
    began = wait_until(lambda: len(list(state.glob("rpa/runs/**/deaf"))) == 2, WAIT_LIMIT)
    assert began, "\n".join(path.read_text() for path in (state / "logs").glob("execution.log"))
    assert any("--user-data-dir" in words for words in processes_of(folder))

    signal_run(run, signal.SIGINT)
    run.wait(WAIT_LIMIT)
    assert processes_of(folder) == []  # at once: the stack waits for its runs and browsers
