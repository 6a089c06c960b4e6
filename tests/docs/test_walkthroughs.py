"""What the tutorial, the how-to about channels and the guide to the API ask a reader to type, typed on a real stack."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from config.environment import ROOT
from config.local.isolated import RunningStack, running_stack
from config.local.processes import select_port, wait_until
from tests.docs.pages import blocks, prose

TUTORIAL = (ROOT / "docs/tutorial.md").read_text("utf-8")
CHANNEL = (ROOT / "docs/how-to/write-a-channel.md").read_text("utf-8")
API = (ROOT / "docs/reference/api.md").read_text("utf-8")
SCALE_OUT = (ROOT / "docs/how-to/scale-out.md").read_text("utf-8")
WAIT_LIMIT = 600.0

pytestmark = pytest.mark.timeout(1200)  # a whole stack starts within the test, and each command starts Python


class Reader:
    """A reader with a home folder, who saves the files and types the commands of a page."""

    def __init__(self, home: Path, port: int) -> None:
        self.home = home
        self.gateway_port = port
        self.stack: RunningStack

    def save_files(self, page: str) -> None:
        """Each Python block belongs to the file that was named last before it."""
        for found in re.finditer(r"^```python\n(.*?)^```$", page, re.MULTILINE | re.DOTALL):
            name = re.findall(r"`~/(my-channels/\w+\.py)`", page[: found.start()])[-1]
            path = self.home / name
            path.parent.mkdir(exist_ok=True)
            path.write_text(found[1].replace("8900", str(self.gateway_port)), "utf-8")

    def type_commands(self, page: str) -> str:
        """All blocks but those that start something that stays, in one shell that ends at the first failure."""
        typed = [block for block in blocks(page, "console") if "make run" not in block and "gateway.py" not in block]
        assert typed
        script = "set -eo pipefail\n" + "".join(typed)
        script = script.replace("http://127.0.0.1:8000", self.stack.base_url).replace(
            ".venv/bin/python", sys.executable
        )
        script = script.replace(".state/", f"{self.stack.state_dir}/").replace("8900", str(self.gateway_port))
        environment = {**self.stack.environment, "HOME": str(self.home)}
        done = subprocess.run(
            ["bash", "-c", script], cwd=ROOT, env=environment, text=True, timeout=WAIT_LIMIT, check=False,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        )  # fmt: skip
        assert done.returncode == 0, done.stdout
        return done.stdout


@pytest.fixture(scope="module")
def reader(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Reader]:
    """One stack for both pages: with the settings of the second, which only add a kind of channel."""
    reader = Reader(tmp_path_factory.mktemp("home"), select_port())
    reader.save_files(CHANNEL)
    exported = re.search(r"^export (.*)\nmake run$", CHANNEL, re.MULTILINE)
    assert exported
    words = dict(word.split("=", 1) for word in exported[1].split())
    words = {name: value.replace("~", str(reader.home)) for name, value in words.items()}
    words["AFTERTOUCH_ALLOWED_PRIVATE_HOSTS"] = f"127.0.0.1:{reader.gateway_port}"
    with running_stack(words, programs=["web", "core", "ticks", "long", "beat"]) as stack:
        stack.await_worker("core")
        reader.stack = stack
        yield reader


@pytest.fixture
def gateway(reader: Reader) -> Iterator[Path]:
    """What the gateway of the page prints."""
    printed = reader.home / "gateway.out"
    with printed.open("wb") as out:
        process = subprocess.Popen(
            [sys.executable, reader.home / "my-channels/gateway.py"], stdout=out, stderr=subprocess.STDOUT
        )
    yield printed
    process.send_signal(signal.SIGTERM)
    process.wait(WAIT_LIMIT)


def test_tutorial_commands_give_the_stated_output(reader: Reader) -> None:
    said = reader.type_commands(TUTORIAL)
    assert "5s" in said  # the difference that the dry run printed
    assert "dry run: nothing was stored" in said
    assert re.search(r'"duplicate": *false', said)
    assert re.search(r'"rule": *"dedupe"', said)


def test_channel_page_sends_and_records_failed_task(reader: Reader, gateway: Path) -> None:
    said = reader.type_commands(CHANNEL)
    assert wait_until(lambda: "13800138001: 【示例】" in gateway.read_text("utf-8"), WAIT_LIMIT)
    assert gateway.read_text("utf-8").count("\n13800138001") <= 1
    assert "no such number" in said


def test_api_page_examples_succeed(reader: Reader) -> None:
    reader.type_commands(API)


def test_capacity_commands_give_the_stated_output(reader: Reader) -> None:
    said = reader.type_commands(SCALE_OUT)
    assert "48 slots, 10 nodes of 5" in said
    assert "runs a second: 0.0 seconds each: 0" in said


def test_scale_out_curves_match_benchmarks() -> None:
    """Each point of the drawings is in the row of the benchmarks that it was taken from."""
    measured = (ROOT / "docs/benchmarks.md").read_text("utf-8")
    for drawing in blocks(SCALE_OUT, "mermaid"):
        points = re.findall(r"line \[(.*)\]", drawing)[0].replace(", ", " · ")
        assert f"| {points} ms |" in measured


def test_page_prose_contains_no_commands() -> None:
    """A command in the prose would be untested."""
    for page in (TUTORIAL, CHANNEL, API, SCALE_OUT):
        assert not re.search(r"^(?:\$ |curl |\.venv/)", prose(page), re.MULTILINE)
