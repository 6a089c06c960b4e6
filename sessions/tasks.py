"""Celery's way in. Each task only calls the domain."""

from __future__ import annotations

from celery import shared_task

from sessions.detection import nudge_stats


@shared_task(name="chat_sessions.count_nudges", is_tick=True)
def count_nudges() -> None:
    nudge_stats.count()
