"""A real server that is there, answers, and takes nothing."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import redis

#: The settings that make it so, by what it answers.
REFUSALS = {"OOM": {"maxmemory": "1"}, "NOREPLICAS": {"min-replicas-to-write": "1"}}


@contextmanager
def refuse_writes(valkey: redis.Redis, code: str = "OOM") -> Iterator[None]:
    before = valkey.config_get(*REFUSALS[code])
    try:
        for name, value in REFUSALS[code].items():
            valkey.config_set(name, value)
        yield
    finally:
        for name, value in before.items():
            valkey.config_set(name, value)
