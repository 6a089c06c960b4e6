"""What the tutorial and the how-to pages ask a reader to type, typed on one real stack."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path

import psycopg
import pytest

from config.environment import ROOT
from config.local.isolated import RunningStack, running_stack
from config.local.processes import select_port, wait_until
from examples.demo import demo_shop
from scheduling.models.touch import WAITING
from tests.docs.pages import blocks, prose
from tests.support.chromium import find_chromium

TUTORIAL = (ROOT / "docs/tutorial.md").read_text("utf-8")
CHANNEL = (ROOT / "docs/how-to/write-a-channel.md").read_text("utf-8")
API = (ROOT / "docs/reference/api.md").read_text("utf-8")
SCALE_OUT = (ROOT / "docs/how-to/scale-out.md").read_text("utf-8")
OWN_PROGRAM = (ROOT / "docs/how-to/use-your-own-rpa-program.md").read_text("utf-8")
FLOW = (ROOT / "docs/how-to/write-a-flow.md").read_text("utf-8")
COMMAND_LIMIT = 600.0
STAYS = ("make run", "gateway.py", "-m examples.demo_shop")  #: blocks that start what stays

pytestmark = pytest.mark.timeout(1200)  # a whole stack starts within the test, and each command starts Python


class Reader:
    """A reader with a home folder, who saves the files and types the commands of a page."""

    def __init__(self, home, gateway_port):
        self.home = home
        self.stack: RunningStack
        self.places = {
            "8900": str(gateway_port), "/home/me": str(home), "/tmp/": f"{home}/",
            "apply_config my-": f"apply_config {home}/my-", ".venv/bin/python": sys.executable,
        }  # fmt: skip

    def sit_at(self, stack):
        self.stack = stack
        self.places |= {"http://127.0.0.1:8000": stack.base_url, ".state/": f"{stack.state_dir}/"}

    def save_files(self, page, language):
        """Each block belongs to the file that was named last before it."""
        for found in re.finditer(rf"^```{language}\n(.*?)^```$", page, re.MULTILINE | re.DOTALL):
            path = self.home / re.findall(r"`~/(my-\w+/[\w.-]+)`", page[: found.start()])[-1]
            path.parent.mkdir(exist_ok=True)
            path.write_text(self.here(found[1]), "utf-8")

    def type_commands(self, page, *, holding="", ends_with=0):
        """The blocks with these words, in one shell that ends at the first failure. What was printed."""
        typed = [
            block
            for block in blocks(page, "console")
            if holding in block and not any(words in block for words in STAYS)
        ]
        assert typed, holding
        environment = {**self.stack.environment, "HOME": str(self.home)}
        done = subprocess.run(
            ["bash", "-c", "set -eo pipefail\n" + self.here("".join(typed))],
            cwd=ROOT, env=environment, text=True, timeout=COMMAND_LIMIT, check=False,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        )  # fmt: skip
        assert done.returncode == ends_with, f"{done.stdout}\n{self.stack.log('execution')[-3_000:]}"
        return done.stdout

    def here(self, text):
        return re.sub("|".join(map(re.escape, self.places)), lambda found: self.places[found[0]], text)


@pytest.fixture(scope="module")
def reader(tmp_path_factory):
    """One stack for all pages, with the settings of each; they only add."""
    gateway_port = select_port()
    reader = Reader(tmp_path_factory.mktemp("home"), gateway_port)
    reader.save_files(CHANNEL, "python")
    for language in ("bash", "python"):
        reader.save_files(OWN_PROGRAM, language)
    exported = {
        name: value.replace("~", str(reader.home))
        for page in (CHANNEL, OWN_PROGRAM, FLOW)
        for words in re.findall(r"^export (.*)\nmake run$", page, re.MULTILINE)
        for name, value in (word.split("=", 1) for word in words.split())
    }
    assert len(exported) == 5
    exported["AFTERTOUCH_ALLOWED_PRIVATE_HOSTS"] = f"127.0.0.1:{gateway_port}"
    with running_stack(exported, programs=["web", "core", "ticks", "long", "execution", "beat"]) as stack:
        for worker in ("core", "execution"):
            stack.await_worker(worker)
        reader.sit_at(stack)
        yield reader


@contextmanager
def gateway(reader):
    """What the gateway of the page prints."""
    printed = reader.home / "gateway.out"
    with printed.open("wb") as out:
        process = subprocess.Popen(
            [sys.executable, reader.home / "my-channels/gateway.py"], stdout=out, stderr=subprocess.STDOUT
        )
    try:
        yield printed
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(COMMAND_LIMIT)


def test_capacity_commands_give_the_stated_output(reader):
    said = reader.type_commands(SCALE_OUT)
    assert "48 slots, 10 nodes of 5" in said
    assert "runs a second: 0.0 seconds each: 0" in said  # no job has run here yet


def test_tutorial_commands_give_the_stated_output(reader):
    said = reader.type_commands(TUTORIAL)
    assert "5s" in said  # the difference that the dry run printed
    assert "dry run: nothing was stored" in said
    assert re.search(r'"duplicate": *false', said)
    assert re.search(r'"rule": *"dedupe"', said)


def test_channel_page_sends_and_records_failed_task(reader):
    with gateway(reader) as printed:
        said = reader.type_commands(CHANNEL)
        assert wait_until(lambda: "13800138001: 【示例】" in printed.read_text("utf-8"), COMMAND_LIMIT)
        assert printed.read_text("utf-8").count("\n13800138001") <= 1
    assert "no such number" in said


def test_api_page_examples_succeed(reader):
    reader.type_commands(API)


def test_own_program_page_runs_both_programs_as_jobs(reader):
    (reader.home / "my-rpa.yaml").write_text(reader.here(blocks(OWN_PROGRAM, "yaml")[0]), "utf-8")
    said = reader.type_commands(OWN_PROGRAM)

    assert '{"result": {"shop": "s1", "page": 3}}' in said
    assert '{"result": {"replied": 2,' in said
    waits = json.loads(said.strip().splitlines()[-1])
    assert waits["state"] in WAITING, "its retry may be dispatched already"
    assert (waits["reason"], waits["attempt"]) == ("exit_1", 1)
    assert waits["runs"][0]["exit_code"] == 1
    assert "the page did not load" in waits["runs"][0]["detail"]
    shown = [json.loads(line) for line in said.splitlines() if line.startswith('{"task_id"')]
    results = [job["result"] for job in shown if job["state"] == "succeeded"]
    assert [set(result) for result in results] == [{"shop", "page"}, {"replied", "home", "directory"}]
    assert results[0] == {"shop": "s1", "page": 3}
    assert not Path(results[1]["directory"]).exists()
    assert Path(results[1]["home"]).parent != Path(results[1]["directory"]).parent


def test_flow_page_commands_run_the_flow_as_a_job(reader):
    """With a real browser and the demo shop."""
    find_chromium()
    with demo_shop() as site:
        reader.places["http://127.0.0.1:8765"] = site
        reader.type_commands(FLOW, holding="flow_sdk new demo_count_unpaid")
        (reader.home / "my-flows/demo_count_unpaid.py").write_text(blocks(FLOW, "python")[0], "utf-8")
        said = reader.type_commands(FLOW, holding="try --flow demo_count_unpaid --payload", ends_with=77)
        assert "SessionExpired: s1 is not logged in." in said
        promised = re.findall(r'^\{"result": \{"unpaid": (\d+)', FLOW, re.MULTILINE)
        said = reader.type_commands(FLOW, holding="try --flow demo_batch_reply --profile")
        assert re.findall(r'^\{"result": \{"unpaid": (\d+)', said, re.MULTILINE) == promised

        (reader.home / "my-shops.yaml").write_text(blocks(FLOW, "yaml")[0], "utf-8")
        said = reader.type_commands(FLOW, holding="publish")
        receipts = [json.loads(line) for line in said.splitlines() if line.startswith("{")]
        assert len(receipts) == 2
        state, result = await_end(reader.stack, receipts[1]["task_id"])
        assert (state, str(result["unpaid"])) == ("succeeded", *promised)


def await_end(stack, task_id):
    """Return the state in which a job ended, and its result."""
    found = []
    with psycopg.connect(stack.endpoints.database_url, autocommit=True) as database:

        def has_ended():
            found[:] = database.execute(
                "SELECT state, result FROM rpa_tasks_job WHERE task_id = %s"
                " AND state IN ('succeeded', 'failed', 'unknown', 'cancelled')",
                [task_id],
            ).fetchall()
            return bool(found)

        assert wait_until(has_ended, COMMAND_LIMIT), stack.log("execution")
    return found[0]


def test_scale_out_curves_match_benchmarks():
    """Each point of the drawings is in the row of the benchmarks that it was taken from."""
    measured = (ROOT / "docs/benchmarks.md").read_text("utf-8")
    for drawing in blocks(SCALE_OUT, "mermaid"):
        points = re.findall(r"line \[(.*)\]", drawing)[0].replace(", ", " · ")
        assert f"| {points} ms |" in measured


def test_page_prose_contains_no_commands():
    """A command in the prose would be untested."""
    for page in (TUTORIAL, CHANNEL, API, SCALE_OUT):
        assert not re.search(r"^(?:\$ |curl |\.venv/)", prose(page), re.MULTILINE)
