"""Celery tasks of sessions. Each task only calls a domain function."""

from __future__ import annotations

from celery import shared_task

from sessions.detection import nudge_stats


@shared_task(name="chat_sessions.count_nudges", is_tick=True)
def count_nudges() -> None:
    nudge_stats.count_effects()
