"""An execution node in a process of its own, as whatever user it is started: two shops with their browsers, a process
that holds a secret, and a hostile flow for one of the shops. Prints what the flow got.

`python node.py DATABASE_URL`, with AFTERTOUCH_STATE_DIR and AFTERTOUCH_RPA_ISOLATION in the environment.
"""

from __future__ import annotations

import json
import os
import secrets
import subprocess
import sys
from datetime import timedelta
from pathlib import Path

import django

django.setup()

from django.conf import settings  # noqa: E402

from rpa_tasks import isolation  # noqa: E402
from rpa_tasks.browsers import registry  # noqa: E402
from rpa_tasks.browsers.launch import LaunchSettings  # noqa: E402
from rpa_tasks.browsers.pool import acquire_browser  # noqa: E402
from rpa_tasks.outcomes import CommandResult  # noqa: E402
from rpa_tasks.supervisor.client import RunSpec, SupervisedCommand  # noqa: E402
from rpa_tasks.worker.runner import make_run_directory  # noqa: E402

LIMIT = 400  #: seconds; the flow reads all files below /tmp
ATTEMPTS = Path(__file__).with_name("hostile_flow.py")
WAIT = timedelta(seconds=120)


def main(database: str) -> None:
    word = secrets.token_hex(8)
    state = Path(settings.AFTERTOUCH_STATE_DIR)
    (state / "endpoints.json").write_text(word)
    holder = subprocess.Popen(["sleep", "600"], env={"DJANGO_SECRET_KEY": word}, start_new_session=True)
    try:
        with (
            acquire_browser("p-s2", "p/s2", wait=WAIT, lease_no=1, launch=LaunchSettings()) as other,
            acquire_browser("p-s1", "p/s1", wait=WAIT, lease_no=1, launch=LaunchSettings()) as own,
        ):
            (registry.profile_dir("p-s2") / "cookies").write_text(word)
            folder = make_run_directory("p-s1", 1)
            environment = {
                "PATH": "/usr/bin:/bin", "HOME": str(isolation.home_dir("p-s1")), "TMPDIR": str(folder / "tmp"),
                "PYTHONPATH": str(settings.BASE_DIR),
            }  # fmt: skip
            param = {
                "state": str(state), "secret": word, "secret_file": str(state / "endpoints.json"),
                "pid": holder.pid, "worker": os.getpid(), "port": own.port,
                "profile": str(registry.profile_dir("p-s1")), "other_profile": str(registry.profile_dir("p-s2")),
                "database": database,
            }  # fmt: skip
            order = RunSpec(
                argv=[sys.executable, str(ATTEMPTS), json.dumps(param)],
                env=environment, timeout=LIMIT, extend_until=float("inf"), log_path=str(state / "run.log"),
                cwd=str(folder),
                prefix=isolation.isolate_run("p-s1", [], str(folder)),
            )  # fmt: skip
            with SupervisedCommand(order) as supervised:
                while not isinstance(event := supervised.next_event(1), CommandResult):
                    pass
            own.release(dirty=True)
            other.release(dirty=True)
    finally:
        holder.kill()
        holder.wait()
    print(
        json.dumps({"isolated": isolation.is_isolated(), "ending": event.tail, "exit": event.exit, "got": event.result})
    )


if __name__ == "__main__":
    main(sys.argv[1])
