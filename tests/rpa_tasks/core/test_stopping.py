"""The flag that marks a worker as stopping for its processes."""

from __future__ import annotations

import multiprocessing

from rpa_tasks.worker.node import Flag

FORK = multiprocessing.get_context("fork")
WAIT_LIMIT = 60


def test_stop_flag_is_visible_in_child_process() -> None:
    flag, seen = Flag(), FORK.Event()

    def look() -> None:
        while not flag.is_set():
            pass
        seen.set()

    child = FORK.Process(target=look)
    child.start()
    flag.set()
    assert seen.wait(WAIT_LIMIT)
    child.join(WAIT_LIMIT)
    flag.clear()
    assert not flag.is_set()


def test_killed_child_does_not_block_stop_flag() -> None:
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
    reader.close()
    writer.close()
