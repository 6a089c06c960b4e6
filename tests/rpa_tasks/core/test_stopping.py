"""The flag that marks a worker as stopping for its processes."""

from __future__ import annotations

import multiprocessing

from rpa_tasks.worker.node import Flag
from tests.support.waiting import WAIT_LIMIT

FORK = multiprocessing.get_context("fork")


def test_stop_flag_reaches_child_processes_although_one_was_killed_in_its_look() -> None:
    flag = Flag()
    reader, writer = FORK.Pipe(duplex=False)

    def look() -> None:
        writer.send_bytes(b"there")
        while not flag.is_set():
            pass

    for _ in range(20):
        victim = FORK.Process(target=look)
        victim.start()
        assert reader.poll(WAIT_LIMIT)
        reader.recv_bytes()
        victim.kill()
        victim.join()
        other = FORK.Process(target=flag.is_set)
        other.start()
        other.join(WAIT_LIMIT)
        assert other.exitcode == 0
    last = FORK.Process(target=look)
    last.start()
    flag.set()
    last.join(WAIT_LIMIT)
    assert last.exitcode == 0
    flag.clear()
    assert not flag.is_set()
    reader.close()
    writer.close()
