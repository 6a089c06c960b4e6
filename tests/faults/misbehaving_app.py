"""Our application with a few tasks that misbehave: `celery -A tests.faults.misbehaving_app worker`."""

from __future__ import annotations

import time
from pathlib import Path

from celery import shared_task

from config.celery import metrics
from config.celery.application import app

__all__ = ["app"]

metrics.SAMPLE_INTERVAL = 0.05  # tests wait for the next report


@shared_task(name="bad.out_of_memory")
def out_of_memory() -> None:
    raise MemoryError("eight exabytes")


@shared_task(name="bad.divide")
def divide(dividend: int, divisor: int) -> None:
    dividend // divisor


@shared_task(name="bad.wait")
def wait(gate: str, mark: str) -> None:
    """Until there is a file of this name; then it leaves a line there."""
    while not Path(gate).exists():
        time.sleep(0.05)
    with Path(gate).open("a") as lines:
        lines.write(f"{mark}\n")
