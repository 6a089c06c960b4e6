"""What the page about one's own RPA program asks a reader to type, typed on a real stack: in Bash and in Python."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from config.environment import ROOT
from config.local.isolated import RunningStack, running_stack
from rpa_tasks.outcomes import DEFAULT_DELAYS, DEFAULT_EXIT_CODES
from rpa_tasks.supervisor.command import PLACEHOLDERS, RUN_MEMBERS
from tests.docs.pages import blocks, prose, table

PAGE = (ROOT / "docs/how-to/use-your-own-rpa-program.md").read_text("utf-8")
WAIT_LIMIT = 600.0

pytestmark = pytest.mark.timeout(1200)  # a whole stack starts within the test, and each command starts Python


class Reader:
    """A user with a home directory saves the files and types the commands of the page."""

    def __init__(self, home: Path) -> None:
        self.home = home
        self.stack: RunningStack

    def save_files(self) -> None:
        (self.home / "my-rpa").mkdir()
        for language in ("bash", "python"):
            for found in re.finditer(rf"^```{language}\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL):
                name = re.findall(r"`~/(my-rpa/[\w.-]+)`", PAGE[: found.start()])[-1]
                (self.home / name).write_text(found[1], "utf-8")
        (self.home / "my-rpa.yaml").write_text(self.here(blocks(PAGE, "yaml")[0]), "utf-8")

    def type_commands(self) -> str:
        """All blocks but the one that starts the stack, in one shell that ends at the first failure."""
        typed = [block for block in blocks(PAGE, "console") if "make run" not in block]
        assert len(typed) == 3
        done = subprocess.run(
            ["bash", "-c", "set -eo pipefail\n" + self.here("".join(typed))],
            cwd=ROOT, env={**self.stack.environment, "HOME": str(self.home)}, text=True, timeout=WAIT_LIMIT,
            check=False,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        )  # fmt: skip
        assert done.returncode == 0, f"{done.stdout}\n{self.stack.log('execution')[-3_000:]}"
        return done.stdout

    def here(self, text: str) -> str:
        places = [("/home/me", self.home), ("/tmp/param.json", self.home / "param.json"),
                  ("apply_config my-rpa.yaml", f"apply_config {self.home / 'my-rpa.yaml'}"),
                  (".venv/bin/python", sys.executable)]  # fmt: skip
        if hasattr(self, "stack"):
            places.append(("http://127.0.0.1:8000", self.stack.base_url))
        for there, instead in places:
            text = text.replace(there, str(instead))
        return text


@pytest.fixture
def reader(tmp_path: Path) -> Iterator[Reader]:
    reader = Reader(tmp_path)
    reader.save_files()
    (exported,) = re.findall(r"^export AFTERTOUCH_RPA_PATHS=~/(\S+)$", PAGE, re.MULTILINE)
    words = {"AFTERTOUCH_RPA_PATHS": str(tmp_path / exported)}
    with running_stack(words, programs=["web", "core", "ticks", "execution", "beat"]) as stack:
        stack.await_worker("execution")
        reader.stack = stack
        yield reader


def test_own_program_page_runs_both_programs_as_jobs(reader: Reader) -> None:
    said = reader.type_commands()

    assert '{"result": {"shop": "s1", "page": 3}}' in said
    assert '{"result": {"replied": 2,' in said
    waits = json.loads(said.strip().splitlines()[-1])
    assert (waits["state"], waits["reason"], waits["attempt"]) == ("scheduled", "exit_1", 1)
    assert waits["runs"][0]["exit_code"] == 1
    assert "the page did not load" in waits["runs"][0]["detail"]
    shown = [json.loads(line) for line in said.splitlines() if line.startswith('{"task_id"')]
    results = [job["result"] for job in shown if job["state"] == "succeeded"]
    assert [set(result) for result in results] == [{"shop", "page"}, {"replied", "home", "directory"}]
    assert results[0] == {"shop": "s1", "page": 3}
    assert not Path(results[1]["directory"]).exists()
    assert Path(results[1]["home"]).parent != Path(results[1]["directory"]).parent


def test_own_program_page_names_every_placeholder_member_and_code() -> None:
    named = set(re.findall(r"`\{(\w+)\}`", "".join(row[0] for row in table(PAGE, "## 1. What your program receives"))))
    assert named == set(PLACEHOLDERS)
    assert all(f"`{member}`" in PAGE for member in RUN_MEMBERS)
    ends = {row[1].strip("`"): row[0] for row in table(PAGE, "## How a run ends")}
    assert {name: tuple(map(int, ends[name].split(", "))) for name in DEFAULT_EXIT_CODES} == DEFAULT_EXIT_CODES
    assert "after {:.0f}, {:.0f} and {:.0f} s".format(*DEFAULT_DELAYS) in PAGE
    assert not re.search(r"^(?:\$ |curl |\.venv/)", prose(PAGE), re.MULTILINE)
