"""Start a command in a new session, with a parent that exits at once.

A browser outlives its run, and often its worker process; as a child of that it would stay a zombie. Usage: `python -I
-S spawn_process.py LOG PLAN COMMAND…`, with the plan of `rpa_tasks.supervisor.confine` as JSON. It prints {"pid": …} or
{"error": …}.
"""

from __future__ import annotations

import json
import os
import sys

sys.path.append(os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__)))))

from rpa_tasks.supervisor import confine


def main(log: str, plan: str, command: list[str]) -> None:
    error_out, error_in = os.pipe()  # closed by a successful exec
    pid = os.fork()
    if pid == 0:
        _exec_browser(command, json.loads(plan), log, error_in)
    os.close(error_in)
    with os.fdopen(error_out, encoding="utf-8") as errors:
        error = errors.read()
    sys.stdout.write(json.dumps({"error": error} if error else {"pid": pid}) + "\n")


def _exec_browser(command: list[str], plan: dict[str, object], log: str, error_in: int) -> None:
    try:
        os.setsid()
        os.umask(0o077)
        nothing = os.open(os.devnull, os.O_RDWR)
        # Append mode, so that a log truncated by the maintainer starts at 0 instead of keeping a hole.
        output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND, 0o600)
        for target, source in enumerate((nothing, output, output)):
            os.dup2(source, target)
        confine.confine_process(plan)
        os.execvp(command[0], command)  # noqa: S606  (no shell is meant)
    except OSError as error:
        os.write(error_in, str(error).encode())
    finally:
        os._exit(127)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], sys.argv[3:])
