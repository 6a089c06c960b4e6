"""What the page about flows asks a reader to type, typed on a real stack, with a real browser and the demo shop."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psycopg
import pytest

from config.environment import ROOT
from config.local.isolated import RunningStack, running_stack
from config.local.processes import wait_until
from examples.demo.order_sync import demo_shop
from tests.docs.pages import blocks
from tests.support.chromium import find_chromium

PAGE = (ROOT / "docs/how-to/write-a-flow.md").read_text("utf-8")
WAIT_LIMIT = 600.0

pytestmark = pytest.mark.timeout(1200)  # a whole stack starts within the test, and each command starts Python


class Reader:
    """A user with a home directory saves the files and types the commands of the page."""

    def __init__(self, home: Path, stack: RunningStack, site: str) -> None:
        self.home, self.stack, self.site = home, stack, site

    def types(self, words: str, *, ends_with: int = 0) -> str:
        """The blocks that hold these words, in a shell of their own. What was printed."""
        typed = [block for block in blocks(PAGE, "console") if words in block]
        assert typed, words
        done = subprocess.run(
            ["bash", "-c", "set -e\n" + self.here("".join(typed))],
            cwd=ROOT, env={**self.stack.environment, "HOME": str(self.home)}, text=True, timeout=WAIT_LIMIT,
            check=False,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        )  # fmt: skip
        assert done.returncode == ends_with, done.stdout
        return done.stdout

    def here(self, text: str) -> str:
        for there, instead in (
            ("http://127.0.0.1:8765", self.site),
            ("http://127.0.0.1:8000", self.stack.base_url),
            (".venv/bin/python", sys.executable),
            ("/tmp/s1", str(self.home / "profile")),
            ("my-shops.yaml", str(self.home / "my-shops.yaml")),
        ):
            text = text.replace(there, instead)
        return text


@pytest.fixture
def reader(tmp_path: Path) -> Iterator[Reader]:
    find_chromium()
    words = {"AFTERTOUCH_RPA_FLOWS": str(tmp_path / "my-flows")}
    with demo_shop() as site, running_stack(words, programs=["web", "core", "ticks", "execution", "beat"]) as stack:
        stack.await_worker("execution")
        yield Reader(tmp_path, stack, site)


def test_flow_page_commands_run_the_flow_as_a_job(reader: Reader) -> None:
    reader.types("flow_sdk new demo_count_unpaid")
    (flow,) = blocks(PAGE, "python")[:1]
    (reader.home / "my-flows/demo_count_unpaid.py").write_text(flow, "utf-8")
    assert "SessionExpired: s1 is not logged in." in reader.types(
        "try --flow demo_count_unpaid --payload", ends_with=77
    )
    promised = re.findall(r'^\{"result": \{"unpaid": (\d+)', PAGE, re.MULTILINE)
    said = reader.types("try --flow demo_batch_reply --profile")
    assert re.findall(r'^\{"result": \{"unpaid": (\d+)', said, re.MULTILINE) == promised

    (reader.home / "my-shops.yaml").write_text(blocks(PAGE, "yaml")[0], "utf-8")
    typed = [block for block in blocks(PAGE, "console") if "apply_config my-shops" in block or "publish '{" in block]
    assert len(typed) == 2
    said = reader.types("publish")
    receipts = [json.loads(line) for line in said.splitlines() if line.startswith("{")]
    assert len(receipts) == 2
    with psycopg.connect(reader.stack.endpoints.database_url, autocommit=True) as database:
        asked = "SELECT state, result FROM rpa_tasks_job WHERE task_id = %s"

        def ended() -> bool:
            row = database.execute(asked, [receipts[1]["task_id"]]).fetchone()
            return row is not None and row[0] in {"succeeded", "failed", "unknown", "cancelled"}

        assert wait_until(ended, WAIT_LIMIT), reader.stack.log("execution")
        state, result = database.execute(asked, [receipts[1]["task_id"]]).fetchone() or ("", {})
    assert (state, str(result["unpaid"])) == ("succeeded", *promised)
