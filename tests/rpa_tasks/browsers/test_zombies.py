"""Ended browsers leave no zombie where PID 1 reaps nothing, as in a container without an init."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable

import psutil
import pytest

from tests.rpa_tasks.browsers.browser_processes import AcquiringProcess, is_gone
from tests.support.waiting import eventually


def list_zombies(*parents: int) -> list[tuple[int, str]]:
    found = [each for each in psutil.process_iter(["ppid", "status", "name"]) if each.info["ppid"] in parents]
    return [(each.pid, each.info["name"]) for each in found if each.info["status"] == psutil.STATUS_ZOMBIE]


@pytest.mark.parametrize("how", ["killed", "closed"])
def test_ended_browser_leaves_no_zombie(start_acquiring_process: Callable[..., AcquiringProcess], how: str) -> None:
    top = start_acquiring_process("s1", "60", script="unreaping_parent.py")
    worker, browser = top.read_reply()["worker"], top.read_reply()["pid"]
    starter = psutil.Process(browser).ppid()

    def list_family() -> list[int]:
        return [each.pid for each in psutil.Process(browser).children(recursive=True)]

    eventually(lambda: len(list_family()) >= 3, "the browser has no helpers")
    family = list_family()
    assert top.request("give") == {"given": True}
    if how == "killed":
        os.kill(browser, signal.SIGKILL)
    else:
        assert top.process.stdin
        top.process.stdin.close()
        eventually(lambda: psutil.Process(worker).status() == psutil.STATUS_ZOMBIE, "the worker does not stop")
    eventually(lambda: all(map(is_gone, [browser, *family])), "a process of the browser runs")
    left = [(worker, psutil.Process(worker).name())] if how == "closed" else []  # nobody of ours is above it
    eventually(lambda: list_zombies(top.process.pid, worker, starter) == left, "zombies are left")
