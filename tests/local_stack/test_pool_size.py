"""How many processes a worker should have: quickly more, slowly fewer."""

from __future__ import annotations

import pytest

from config.celery.autoscaler import MAX_MESSAGE_WAIT, MESSAGES_PER_SECOND, PoolSizer, WorkerLoad

LEAST, MOST = 1, 8
CALM = 30.0


def make_load(processes: int, *, busy: int = 0, waiting: int = 0, oldest: float = 0.0, soon: int = 0) -> WorkerLoad:
    return WorkerLoad(processes, busy, waiting, oldest, soon)


def compute_size(seen: WorkerLoad, now: float = 0.0) -> int:
    return PoolSizer(CALM, 0.0).size(seen, least=LEAST, most=MOST, now=now)


@pytest.mark.parametrize(
    ("seen", "expected"),
    [
        (make_load(2, busy=2, waiting=6, oldest=MAX_MESSAGE_WAIT), 4),
        (make_load(2, busy=2, waiting=1, oldest=9.0), 3),
        (make_load(4, busy=4, waiting=9, oldest=9.0), MOST),
        (make_load(7, busy=7, waiting=9, oldest=9.0), MOST),
        (make_load(2, busy=2, waiting=6, oldest=MAX_MESSAGE_WAIT / 2), 2),
        (make_load(2, soon=2 * MESSAGES_PER_SECOND + 1), 3),
        (make_load(2, soon=2 * MESSAGES_PER_SECOND), 2),
        (make_load(MOST, busy=MOST, waiting=9, oldest=9.0), MOST),
    ],
    ids=[
        "many wait for long", "one waits for long", "it doubles at once", "not above the most", "they wait briefly",
        "more falls due than it gets through", "as much falls due as it gets through", "it is at the most",
    ],
)  # fmt: skip
def test_pool_size_grows_when_messages_wait(seen: WorkerLoad, expected: int) -> None:
    assert compute_size(seen) == expected


def test_pool_size_shrinks_by_one_after_spare_time() -> None:
    sizer, sizes = PoolSizer(CALM, 0.0), [4]
    for second in range(120):
        sizes.append(sizer.size(make_load(sizes[-1], busy=1), least=2, most=MOST, now=float(second)))
    assert sizes[-1] == 2
    assert sizes.index(3) > CALM
    assert sizes.index(3) + CALM / 5 < sizes.index(2) < sizes.index(3) + CALM / 2


def test_pool_size_stays_after_full_use() -> None:
    sizer = PoolSizer(CALM, 0.0)
    assert sizer.size(make_load(2, busy=2), least=LEAST, most=MOST, now=CALM - 1) == 2
    assert sizer.size(make_load(2), least=LEAST, most=MOST, now=CALM + 1) == 2
    assert sizer.size(make_load(2), least=LEAST, most=MOST, now=2 * CALM) == 1


def test_pool_size_stays_at_the_minimum() -> None:
    sizer = PoolSizer(CALM, 0.0)
    assert sizer.size(make_load(LEAST), least=LEAST, most=MOST, now=1000.0) == LEAST
