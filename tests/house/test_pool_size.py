"""How many processes a worker should have: quickly more, slowly fewer."""

from __future__ import annotations

import pytest

from config.celery.autoscaler import MAX_MESSAGE_WAIT, MESSAGES_PER_SECOND, PoolSizer, WorkerLoad

LEAST, MOST = 1, 8
CALM = 30.0


def look(processes: int, *, busy: int = 0, waiting: int = 0, oldest: float = 0.0, soon: int = 0) -> WorkerLoad:
    return WorkerLoad(processes, busy, waiting, oldest, soon)


def size(seen: WorkerLoad, now: float = 0.0) -> int:
    return PoolSizer(CALM, 0.0).size(seen, least=LEAST, most=MOST, now=now)


@pytest.mark.parametrize(
    ("seen", "expected"),
    [
        (look(2, busy=2, waiting=6, oldest=MAX_MESSAGE_WAIT), 4),
        (look(2, busy=2, waiting=1, oldest=9.0), 3),
        (look(4, busy=4, waiting=9, oldest=9.0), MOST),
        (look(7, busy=7, waiting=9, oldest=9.0), MOST),
        (look(2, busy=2, waiting=6, oldest=MAX_MESSAGE_WAIT / 2), 2),
        (look(2, soon=2 * MESSAGES_PER_SECOND + 1), 3),
        (look(2, soon=2 * MESSAGES_PER_SECOND), 2),
        (look(MOST, busy=MOST, waiting=9, oldest=9.0), MOST),
    ],
    ids=[
        "many wait for long", "one waits for long", "it doubles at once", "not above the most", "they wait briefly",
        "more falls due than it gets through", "as much falls due as it gets through", "it is at the most",
    ],
)  # fmt: skip
def test_it_grows_where_messages_wait(seen: WorkerLoad, expected: int) -> None:
    assert size(seen) == expected


def test_it_shrinks_by_one_when_there_was_one_to_spare_for_long_enough() -> None:
    sizer, sizes = PoolSizer(CALM, 0.0), [4]
    for second in range(120):
        sizes.append(sizer.size(look(sizes[-1], busy=1), least=2, most=MOST, now=float(second)))
    assert sizes[-1] == 2
    assert sizes.index(3) > CALM
    assert sizes.index(3) + CALM / 5 < sizes.index(2) < sizes.index(3) + CALM / 2


def test_a_moment_in_which_all_were_needed_puts_it_off() -> None:
    sizer = PoolSizer(CALM, 0.0)
    assert sizer.size(look(2, busy=2), least=LEAST, most=MOST, now=CALM - 1) == 2
    assert sizer.size(look(2), least=LEAST, most=MOST, now=CALM + 1) == 2
    assert sizer.size(look(2), least=LEAST, most=MOST, now=2 * CALM) == 1


def test_it_never_shrinks_below_its_least() -> None:
    sizer = PoolSizer(CALM, 0.0)
    assert sizer.size(look(LEAST), least=LEAST, most=MOST, now=1000.0) == LEAST
