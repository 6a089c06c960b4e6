"""Start a command in a new session, with a parent that exits at once.

A browser outlives its run, and often its worker process; as a child of that it would stay a zombie. Usage: `python -I
-S spawn_process.py ORDER COMMAND…`. ORDER is JSON: {"log", "listener", "profile"}. With a listener, the forwarder
starts in the same session, outside of the sandbox, and reads standard input; without a command it leads the session.
It prints {"pid": …} or {"error": …}.
"""

from __future__ import annotations

import json
import os
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

FORWARDER = os.path.join(os.path.dirname(os.path.abspath(__file__)), "forwarder.py")


def main(order: dict[str, Any], command: list[str]) -> None:
    error_out, error_in = os.pipe()  # closed by a successful exec
    pid = os.fork()
    if pid == 0:
        _exec_browser(command, order, error_in)
    os.close(error_in)
    with os.fdopen(error_out, encoding="utf-8") as errors:
        error = errors.read()
    sys.stdout.write(json.dumps({"error": error} if error else {"pid": pid}) + "\n")


def _exec_browser(command: list[str], order: dict[str, Any], error_in: int) -> None:
    try:
        os.setsid()
        os.umask(0o077)
        nothing = os.open(os.devnull, os.O_RDWR)
        # Append mode, so that a log truncated by the maintainer starts at 0 instead of keeping a hole.
        output = os.open(order["log"], os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND, 0o600)
        os.dup2(output, 1)
        os.dup2(output, 2)
        if order["listener"] >= 0:
            if not command or os.fork() == 0:
                # A leader names its profile, as Chromium does.
                words = [] if command else [f"--user-data-dir={order['profile']}"]
                forwarder = [sys.executable, "-I", "-S", FORWARDER, str(order["listener"]), *words]
                os.execv(forwarder[0], forwarder)  # noqa: S606  (no shell is meant)
            os.close(order["listener"])
        os.dup2(nothing, 0)
        os.execvp(command[0], command)  # noqa: S606  (no shell is meant)
    except OSError as error:
        os.write(error_in, str(error).encode())
    finally:
        os._exit(127)


if __name__ == "__main__":
    main(json.loads(sys.argv[1]), sys.argv[2:])
