"""Disable receiver addresses that answered HTTP 410 (gone), and look them up for given targets.

A row expires `AFTERTOUCH_DISABLED_TARGET_DAYS` after the last 410. An operator who sets an address again enables it at
once. Lookups name their targets, because the table may hold a million rows.
"""

from __future__ import annotations

from collections.abc import Iterable
from datetime import timedelta

from django.conf import settings

from scheduling import sql
from scheduling.models.node import digest_address

__all__ = [
    "Target",
    "TargetLookup",
    "channels_with_disabled",
    "delete_expired_targets",
    "digest_address",
    "find_disabled",
    "store_disabled_targets",
]  # fmt: skip

Target = tuple[int, str]  #: channel id and digest of the address


def disabled_duration() -> timedelta:
    return timedelta(days=settings.AFTERTOUCH_DISABLED_TARGET_DAYS)


def channels_with_disabled(channel_ids: Iterable[int]) -> set[int]:
    """Return the channels that have a disabled target. For the others the caller computes no digest."""
    return {row[0] for row in sql.rows(_CHANNELS, {"channels": sorted(set(channel_ids))})}


def find_disabled(targets: Iterable[Target]) -> set[Target]:
    """Return the `targets` that are disabled."""
    wanted = sorted(set(targets))
    if not wanted:
        return set()
    given = {
        "channels": [each[0] for each in wanted],
        "digests": [each[1] for each in wanted],
        "kept": disabled_duration(),
    }
    return {(row[0], row[1]) for row in sql.rows(_AMONG, given)}


class TargetLookup:
    """Support `target in lookup`. Query the database once for each channel and target."""

    def __init__(self) -> None:
        self._channels: dict[int, bool] = {}
        self._known: dict[Target, bool] = {}

    def __contains__(self, target: object) -> bool:
        assert isinstance(target, tuple)
        channel_id, _ = target
        if channel_id not in self._channels:
            self._channels[channel_id] = bool(channels_with_disabled([channel_id]))
        if not self._channels[channel_id]:
            return False
        if target not in self._known:
            self._known[target] = bool(find_disabled([target]))
        return self._known[target]


def store_disabled_targets(found: Iterable[tuple[int, str, str, str]]) -> None:
    """Disable targets, given as channel id, digest, chat id and reason. Repeating it extends the expiry."""
    rows = sorted({(each[0], each[1]): each for each in found}.values())  # one order for all writers prevents deadlocks
    if rows:
        names = ("channels", "digests", "chats", "reasons")
        sql.execute(_DISABLE, {name: [row[place] for row in rows] for place, name in enumerate(names)})


def delete_expired_targets(limit: int) -> int:
    """Delete up to `limit` expired rows. Skip locked rows."""
    return sql.execute(_DELETE_EXPIRED, {"kept": disabled_duration(), "limit": limit})


_CHANNELS = """
SELECT c FROM unnest(%(channels)b::bigint[]) AS c
WHERE EXISTS (SELECT FROM scheduling_disabledtarget AS d WHERE d.channel_id = c)
"""

_AMONG = """
SELECT d.channel_id, d.target_digest
FROM unnest(%(channels)b::bigint[], %(digests)b::text[]) AS v(channel_id, digest)
JOIN scheduling_disabledtarget AS d ON d.channel_id = v.channel_id AND d.target_digest = v.digest
WHERE d.disabled_at > statement_timestamp() - %(kept)s::interval
"""

_DISABLE = """
INSERT INTO scheduling_disabledtarget (channel_id, target_digest, chat_id, reason, disabled_at)
SELECT channel_id, digest, chat_id, reason, statement_timestamp()
FROM unnest(%(channels)b::bigint[], %(digests)b::text[], %(chats)b::text[], %(reasons)b::text[])
    AS v(channel_id, digest, chat_id, reason)
ORDER BY channel_id, digest
ON CONFLICT (channel_id, target_digest) DO UPDATE
SET disabled_at = EXCLUDED.disabled_at, chat_id = EXCLUDED.chat_id, reason = EXCLUDED.reason
"""

_DELETE_EXPIRED = """
DELETE FROM scheduling_disabledtarget WHERE id IN (
    SELECT id FROM scheduling_disabledtarget WHERE disabled_at < statement_timestamp() - %(kept)s::interval
    ORDER BY disabled_at LIMIT %(limit)s FOR UPDATE SKIP LOCKED
)
"""
