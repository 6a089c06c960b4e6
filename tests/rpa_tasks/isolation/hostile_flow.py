"""A hostile flow tries forbidden actions and required ones, and reports the results.

`python hostile_flow.py PARAM`, where PARAM names the state folder, ports, pids and the secret word.
"""

from __future__ import annotations

import ctypes
import json
import os
import sys
import urllib.request
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import psycopg
from websockets.sync.client import connect

PTRACE_ATTACH = 16
LIMIT = 60  #: seconds for an answer
PARAM = json.loads(sys.argv[1])
STATE, SECRET = Path(PARAM["state"]), PARAM["secret"]


def attempt(what: Callable[[], Any]) -> Any:
    """What it gave, or the error's name."""
    try:
        return what()
    except Exception as error:
        return f"{type(error).__name__}: {error}"[:200]


def environments() -> list[str]:
    """Return processes with the secret word in their environment."""
    found = []
    for name in filter(str.isdigit, os.listdir("/proc")):
        with suppress(OSError):
            if SECRET.encode() in Path(f"/proc/{name}/environ").read_bytes():
                found.append(name)
    return found


def secrets_below(folder: Path) -> list[str]:
    """Files that can be read and hold the secret word, wherever they lie below the folder."""
    found = []
    for above, _, files in os.walk(folder):
        for name in files:
            with suppress(OSError):
                if SECRET.encode() in (Path(above) / name).read_bytes():
                    found.append(str(Path(above) / name))
    return found


def traced(pid: int) -> int:
    libc = ctypes.CDLL(None, use_errno=True)
    return int(libc.ptrace(PTRACE_ATTACH, pid, None, None))


def version(port: int) -> str:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/json/version", timeout=LIMIT) as answer:
        return str(json.load(answer)["Browser"])


def shown(url: str) -> str:
    """The text of a page in our own browser."""
    request = urllib.request.Request(f"http://127.0.0.1:{PARAM['port']}/json/new?about:blank", method="PUT")
    with urllib.request.urlopen(request, timeout=LIMIT) as answer:
        page = json.load(answer)
    with connect(page["webSocketDebuggerUrl"], proxy=None, max_size=None) as tab:

        def call(number: int, method: str, **params: Any) -> Any:
            tab.send(json.dumps({"id": number, "method": method, "params": params}))
            while (said := json.loads(tab.recv(timeout=LIMIT))).get("id") != number:
                pass
            return said.get("result")

        call(1, "Page.enable")
        moved = call(2, "Page.navigate", url=url) or {}
        if "errorText" in moved:
            return f"error: {moved['errorText']}"
        while json.loads(tab.recv(timeout=LIMIT)).get("method") != "Page.loadEventFired":
            pass
        text = call(3, "Runtime.evaluate", expression="document.documentElement.innerText")
        return str(text["result"].get("value", ""))


def main() -> None:
    pid, database = PARAM["pid"], PARAM["database"]
    found = {
        "uid": os.getuid(),
        "environments": attempt(environments),
        "files": attempt(lambda: secrets_below(STATE) + secrets_below(Path.home()) + secrets_below(Path("/tmp"))),
        "passwords": attempt(lambda: Path("/etc/shadow").read_text()),
        "other_profile": attempt(lambda: os.listdir(PARAM["other_profile"])),
        "state": attempt(lambda: os.listdir(STATE)),
        "ptrace": attempt(lambda: traced(pid)),
        "ptrace_worker": attempt(lambda: traced(PARAM["worker"])),
        "kill": attempt(lambda: os.kill(pid, 0)),
        "file_by_browser": attempt(lambda: shown(f"file://{PARAM['secret_file']}")),
        "environ_by_browser": attempt(lambda: shown(f"file:///proc/{pid}/environ")),
        "database": attempt(lambda: psycopg.connect(database, connect_timeout=LIMIT) and "connected"),
        "our_port": attempt(lambda: version(PARAM["port"])),
        "our_page": attempt(lambda: shown("data:text/html,<p>here</p>")),
        "our_profile": attempt(lambda: bool(os.listdir(PARAM["profile"]))),
        "our_folder": attempt(lambda: Path("written").write_text("here")),
        "our_home": attempt(lambda: (Path.home() / "written").write_text("here")),
        "our_variables": sorted(os.environ),
    }
    print(json.dumps({"result": found}))


if __name__ == "__main__":
    main()
