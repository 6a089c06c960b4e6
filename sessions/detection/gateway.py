"""Gateways that keep a key with a time to live for each user who is there, as the article does."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

from django.conf import settings

from sessions.store.client import Server


@dataclass(frozen=True)
class Pattern:
    """`session:*`: what stands for the star is the user. Raises `ValueError` unless there is exactly one star."""

    text: str

    def __post_init__(self) -> None:
        if self.text.count("*") != 1 or any(sign in self.text for sign in "?[]\\"):
            raise ValueError(f"“{self.text}” must have one * in the place of the user, and no other wildcard")

    def user_of(self, key: str) -> str | None:
        before, after = self.text.split("*")
        if len(key) <= len(before) + len(after) or not key.startswith(before) or not key.endswith(after):
            return None
        return key[len(before) : len(key) - len(after)]


def server() -> Server:
    """Where the gateways' keys are: the server of the live sessions unless a setting says otherwise."""
    return _on(settings.AFTERTOUCH_GATEWAY_REDIS_URL or settings.REDIS_URL)


@cache
def _on(url: str) -> Server:
    return Server(url)


def is_back(keys: Sequence[str]) -> set[str]:
    """Which of these keys exist again."""
    if not keys:
        return set()
    found = server().ask(lambda pipe: [pipe.exists(key) for key in keys])
    return {key for key, exists in zip(keys, found, strict=True) if exists}
