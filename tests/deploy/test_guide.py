"""The guide to deploying, followed line by line: in a fresh folder, by a user who may write nowhere else, with nothing
in the environment. Folders and ports are other ones; packages are there already; each unit's own command runs in
systemd's place."""

import json
import re
import shutil
import subprocess
import urllib.request
from contextlib import ExitStack
from pathlib import Path

import pytest

from config.environment import ROOT
from config.local.processes import wait_until
from tests.deploy.bare_machine import bare_machine, create_cluster, postgres, redis_server
from tests.docs.pages import blocks

GUIDE = (ROOT / "docs" / "how-to" / "deploy.md").read_text("utf-8")
EXAMPLE = "environment.example /etc/aftertouch/environment"
UNITS = ("web", "core", "ticks", "long", "execution", "beat", "watcher", "flower")


@pytest.fixture
def machine():
    if shutil.which("openssl") is None:
        pytest.skip("missing service: openssl")
    with bare_machine() as machine:
        subprocess.run(["git", "clone", "--quiet", "--bare", str(ROOT), machine.env["REPOSITORY"]], check=True)
        machine.own(Path(machine.env["REPOSITORY"]))
        yield machine


@pytest.mark.campaign
def test_deploy_guide_sets_up_machine(machine):
    todo = [block.replace(EXAMPLE, f"{EXAMPLE}\n{machine.elsewhere}") for block in blocks(GUIDE, "console")]
    *todo, check = todo
    create_cluster(machine)
    with ExitStack() as programs:
        programs.enter_context(postgres(machine))
        api_key = machine.run("\n".join(todo)).split()[-1]
        programs.enter_context(redis_server(machine))
        for name in UNITS:
            command, env = machine.unit(name)
            programs.enter_context(machine.running(command, name, env))
        live = f"http://127.0.0.1:{machine.ports['8000']}/health/live"
        assert wait_until(lambda: _answers(live), 120, 0.3), machine.log("web")
        assert '"status": "ok"' in machine.run(check)
        _send_an_event(machine, api_key)


def _answers(url):
    try:
        with urllib.request.urlopen(url, timeout=3) as answer:
            return bool(answer.status == 200)
    except OSError:
        return False


def _send_an_event(machine, api_key):
    event = {"specversion": "1.0", "id": "1", "source": "/shop", "type": "material.downloaded", "subject": "ann"}
    headers = {
        "Authorization": f"Bearer {api_key}", "Content-Type": "application/json",
        "Host": "aftertouch.example.com", "X-Forwarded-Proto": "https",
    }  # fmt: skip
    url = f"http://127.0.0.1:{machine.ports['8000']}/api/v1/events"
    with urllib.request.urlopen(urllib.request.Request(url, json.dumps(event).encode(), headers), timeout=30) as answer:
        assert (answer.status, len(json.load(answer)["touches"])) == (202, 1)


@pytest.mark.parametrize("page", ["deploy.md", "keep-the-data.md"])
def test_page_marks_untested_commands(page):
    """Every block of commands is run by a test or marked as not run."""
    text = (ROOT / "docs" / "how-to" / page).read_text("utf-8")
    for match in re.finditer(r"([^\n]*\n[^\n]*\n[^\n]*)\n\n```sh\n", text):
        assert "not tried" in match[1].lower(), match[1]
