"""The flag that marks a worker as stopping for its processes."""

import multiprocessing

from rpa_tasks.worker.node import stopping
from tests.support.waiting import WAIT_LIMIT

FORK = multiprocessing.get_context("fork")


def test_stop_flag_reaches_child_processes_although_one_was_killed_in_its_look():
    reader, writer = FORK.Pipe(duplex=False)

    def look():
        writer.send_bytes(b"there")
        while not stopping[0]:
            pass

    for _ in range(20):
        victim = FORK.Process(target=look)
        victim.start()
        assert reader.poll(WAIT_LIMIT)
        reader.recv_bytes()
        victim.kill()
        victim.join()
        other = FORK.Process(target=lambda: stopping[0])
        other.start()
        other.join(WAIT_LIMIT)
        assert other.exitcode == 0
    last = FORK.Process(target=look)
    last.start()
    stopping[0] = 1
    last.join(WAIT_LIMIT)
    stopping[0] = 0
    assert last.exitcode == 0
    reader.close()
    writer.close()
