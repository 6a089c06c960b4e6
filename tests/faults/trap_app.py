"""Our application with a few tasks that misbehave: `celery -A tests.faults.trap_app worker`."""

from __future__ import annotations

from celery import shared_task

from config.celery import app

__all__ = ["app"]


@shared_task(name="traps.out_of_memory")
def out_of_memory() -> None:
    raise MemoryError("eight exabytes")


@shared_task(name="traps.divide")
def divide(dividend: int, divisor: int) -> None:
    dividend // divisor
