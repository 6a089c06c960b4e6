"""Platforms and flows of a new deployment: templates that an operator restores, or that a configuration file lists."""

from __future__ import annotations

from django.utils.timezone import now

from rpa_tasks.models import Flow, Platform

PLATFORMS = {"pdd": "拼多多", "temu": "Temu", "tiktok": "TikTok Shop"}
#: Whether a repeat has no second effect.
TASK_TYPES = {"sync_order": True, "refresh_goods": True, "batch_reply": False}
#: The call of an RPA tool; its program is to be replaced.
COMMAND = ["rpa-cli", "run", "--flow", "{flow}", "--param", "{param}", "--timeout", "{timeout}"]


def ship_platforms() -> str:
    """Create the platforms and flows as retired rows, while there is no platform. Returns a line for the operator."""
    if Platform.objects.exists():
        return ""
    at = now()
    for key, name in PLATFORMS.items():
        platform = Platform.objects.create(key=key, name=name, retired_at=at)
        for task_type, idempotent in TASK_TYPES.items():
            Flow.objects.create(
                platform=platform, task_type=task_type, command=COMMAND, idempotent=idempotent, retired_at=at
            )
    return f"Shipped platforms, not in use: {', '.join(PLATFORMS)}"
