"""A process that acquires browsers, to be raced and killed.

    python acquiring_process.py PROFILE WAIT

prints {"pid", "slot"}; then gives the browser back at each line on standard input, and prints so. With `--rounds N` it
acquires and releases N times, and appends a line at each change to `--log`.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import sys
import time
from datetime import timedelta

import django

django.setup()

from rpa_tasks.browsers.launch import LaunchSettings, NoBrowser  # noqa: E402
from rpa_tasks.browsers.pool import AcquiredBrowser, acquire_browser  # noqa: E402
from tests.rpa_tasks.browsers.browser_processes import extend_time_limits  # noqa: E402


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("profile")
    parser.add_argument("wait", type=float)
    parser.add_argument("--rounds", type=int, default=0)
    parser.add_argument("--log", default="")
    order = parser.parse_args()
    extend_time_limits()
    if order.rounds:
        _race(order.profile.split(","), order.wait, order.rounds, order.log)
        return
    borrowed = _acquire(order.profile, order.wait)
    _print_line({"pid": borrowed.pid, "slot": borrowed.slot})
    for _ in sys.stdin:
        borrowed.release()
        _print_line({"given": True})


def _acquire(profile: str, wait: float) -> AcquiredBrowser:
    return acquire_browser(
        profile, f"shop/{profile}", wait=timedelta(seconds=wait), lease_no=1, launch=LaunchSettings()
    )


def _race(profiles: list[str], wait: float, rounds: int, log: str) -> None:
    notes = os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    for _ in range(rounds):
        profile = random.choice(profiles)
        try:
            with _acquire(profile, wait) as found:
                os.write(notes, f"+ {profile} {found.slot} {found.pid}\n".encode())
                time.sleep(random.uniform(0, 0.05))  # the work
                os.write(notes, f"- {profile} {found.slot} {found.pid}\n".encode())
        except NoBrowser as error:
            os.write(notes, f"! {profile} {error.reason} {error.detail}\n".encode())


def _print_line(what: dict[str, object]) -> None:
    print(json.dumps(what), flush=True)


if __name__ == "__main__":
    main()
