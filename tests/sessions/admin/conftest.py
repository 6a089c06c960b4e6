"""How the pages about chats are read."""

from __future__ import annotations

from typing import Any

from django.urls import reverse


def url(name: str, *args: Any) -> str:
    return reverse(f"admin:chat_sessions_{name}", args=args)


def text(answer: Any) -> str:
    assert answer.status_code == 200, answer
    return str(answer.content.decode())
