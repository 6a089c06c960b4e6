from __future__ import annotations

from benchmarks.bench import Bench


def webhook(bench: Bench) -> None:
    raise NotImplementedError
