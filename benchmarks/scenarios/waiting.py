from __future__ import annotations

from benchmarks.bench import Bench


def waiting(bench: Bench) -> None:
    raise NotImplementedError
