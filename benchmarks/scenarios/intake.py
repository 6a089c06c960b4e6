from __future__ import annotations

from benchmarks.bench import Bench


def intake(bench: Bench) -> None:
    raise NotImplementedError
