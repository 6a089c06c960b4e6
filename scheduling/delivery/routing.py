"""Find the channel and the address of a touch, the disabled addresses, and messages by their vendors' ids.

A route is the channel instance and the address of a touch. An address that answered HTTP 410 (gone) is disabled. Its
row expires `AFTERTOUCH_DISABLED_TARGET_DAYS` after the last 410. An operator who sets an address again enables it at
once. Lookups name their targets, because the table may hold a million rows.

A receipt names a message by the vendor's id. The attempts of touches hold it too, but finding it there would read all
of them.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Mapping
from contextlib import suppress
from datetime import datetime, timedelta
from typing import Any, NamedTuple, cast
from uuid import UUID

from django.conf import settings

from scheduling import sql
from scheduling.channels.base import Channel, Message, channel_kinds
from scheduling.channels.quota import receiver_key
from scheduling.ids import new_id
from scheduling.models import Community
from scheduling.models.encrypted import Sealed, Unreadable
from scheduling.models.node import digest_address
from scheduling.policy.specs import ChannelSpec, CustomerSpec

# --- channels and addresses -------------------------------------------------------------------------------------------


class NoTarget(Exception):
    """A touch has no usable address. `reason` is the code of its failure."""

    def __init__(self, reason: str, detail: str = "") -> None:
        super().__init__(detail or reason)
        self.reason = reason


class Route(NamedTuple):
    """The channel and the target of a touch."""

    channel: Channel
    target: Mapping[str, Any]
    receiver: str  #: key of the receiver's lane: each channel row has a lane of its own
    vendor_key: str  #: key by which the quotas of the channel count; empty without quotas


FoundRoute = Route | NoTarget | Unreadable  #: or why there is none

_NONE = UUID(int=0)
_channels: dict[int, tuple[ChannelSpec, Channel]] = {}


def channel_of(spec: ChannelSpec) -> Channel:
    """Return the channel for its current settings. Instances are cached per process and setting.

    Raises:
        NoTarget: the channel is retired or misconfigured.
        Unreadable: this node lacks the encryption key of its settings.
    """
    known = _channels.get(spec.id)
    if known and (known[0] is spec or known[0] == spec):
        return known[1]
    kind = channel_kinds().get(spec.kind)
    if spec.retired or kind is None:
        raise NoTarget("channel_retired", f"channel {spec.key} ({spec.kind})")
    if isinstance(spec.config, Sealed):
        spec.config.open()
    try:
        channel = kind(spec.config, spec.timeout)
    except ValueError as error:
        raise NoTarget("channel_misconfigured", f"channel {spec.key}: {error}") from None
    if spec.limits:
        channel.quotas = (*channel.quotas, *spec.limits)  # for this row only
    _channels[spec.id] = (spec, channel)
    return channel


def find_preview_escape(spec: ChannelSpec) -> Callable[[str], str]:
    """Return the escape of a channel's format; that of plain text if the channel cannot be used here."""
    try:
        return channel_of(spec).escape
    except (NoTarget, Unreadable):
        return str


def target_for(
    spec: ChannelSpec,
    channel: Channel,
    customer: CustomerSpec,
    chat_id: str,
    communities: Mapping[str, Mapping[str, Any]],
    disabled: Container[Target],
) -> Mapping[str, Any]:
    """Return the community's target or the customer's address.

    `disabled` holds the disabled targets: those of a batch (`find_disabled_targets`), or a `TargetLookup`.

    Raises:
        NoTarget: there is no target, or it is disabled.
    """
    if channel.address_key:
        address = customer.addresses.get(channel.address_key)
        target = {"address": address} if address else {}
    else:
        targets = communities.get(chat_id, {})
        target = targets.get(spec.key) or targets.get(spec.kind) or {}
    if channel.needs_target and not target:
        raise NoTarget("no_target", f"no {spec.kind} target for {chat_id or customer.user_id}")
    if disabled and (spec.id, target_digest(spec, target)) in disabled:
        raise NoTarget("target_disabled", "the vendor answered that this receiver is gone")
    return target


def find_route(
    spec: ChannelSpec,
    customer: CustomerSpec,
    chat_id: str,
    communities: Mapping[str, Mapping[str, Any]],
    disabled: Container[Target],
) -> FoundRoute:
    """Return the route of a touch before its message exists, or why there is none.

    A defect of the channel becomes `channel_error`. Errors are new ones: the traceback of a raised one would keep the
    batch in memory.
    """
    try:
        channel = channel_of(spec)
        target = target_for(spec, channel, customer, chat_id, communities, disabled)
        blank = Message(
            _NONE, _NONE, customer.user_id, chat_id, "", "", "", "", "", "", {},
            target=target, spoke_at=customer.conversation_at,
        )  # fmt: skip
        vendor_key = receiver_key(channel, blank) if channel.quotas else ""
        return Route(channel, target, f"{spec.id}:{channel.target_key(blank)}", vendor_key)
    except NoTarget as error:
        return NoTarget(error.reason, str(error))
    except Unreadable as error:
        return Unreadable(str(error))
    except sql.UNAVAILABLE_ERRORS:  # `disabled` may be a `TargetLookup`
        raise
    except Exception as error:  # a defect of the channel
        return NoTarget("channel_error", f"{type(error).__name__}: {error}"[:500])


def target_digest(spec: ChannelSpec, target: Mapping[str, Any]) -> str:
    """Return a digest that identifies a receiver without exposing its address."""
    address = target.get("url") or target.get("address") or spec.config.get("url") or spec.key
    return digest_address(address)


def find_disabled_targets(
    wanted: Iterable[tuple[ChannelSpec, CustomerSpec, str]], communities: Mapping[str, Mapping[str, Any]]
) -> set[Target]:
    """Return the disabled targets among those of `wanted` (channel, customer, chat id), in at most two statements."""
    asked = list(wanted)
    struck = channels_with_disabled(spec.id for spec, _, _ in asked)
    targets: set[Target] = set()
    for spec, customer, chat_id in asked:
        if spec.id in struck:
            with suppress(NoTarget, Unreadable):  # reported when the touch is sent
                target = target_for(spec, channel_of(spec), customer, chat_id, communities, ())
                targets.add((spec.id, target_digest(spec, target)))
    return find_disabled(targets)


def load_community_targets(chat_ids: Iterable[str]) -> dict[str, Mapping[str, Any]]:
    """Return the targets of communities, by channel key or kind."""
    wanted = sorted({chat_id for chat_id in chat_ids if chat_id})
    if not wanted:
        return {}
    rows = Community.objects.filter(chat_id__in=wanted, retired_at=None).values_list("chat_id", "targets")
    return {chat_id: cast(Mapping[str, Any], targets) for chat_id, targets in rows}


# --- disabled addresses -----------------------------------------------------------------------------------------------


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


# --- vendors' ids of messages -----------------------------------------------------------------------------------------


VendorId = tuple[int, str]  #: channel id and the vendor's id


def store_vendor_ids(sent: Iterable[tuple[int, str, UUID]]) -> None:
    """Store channel id, vendor's id and delivery key of sent messages. A repeat has no effect."""
    rows = sorted(sent)  # one order for all writers prevents deadlocks
    if rows:
        sql.execute(
            _STORE,
            {
                "ids": [new_id() for _ in rows],
                "channels": [row[0] for row in rows],
                "vendor_ids": [row[1] for row in rows],
                "keys": [row[2] for row in rows],
            },
        )


def find_delivery_keys(wanted: Iterable[VendorId]) -> dict[VendorId, UUID]:
    """Return the delivery keys of the messages with these ids."""
    asked = sorted(set(wanted))
    if not asked:
        return {}
    given = {"channels": [each[0] for each in asked], "vendor_ids": [each[1] for each in asked]}
    return {(row[0], row[1]): row[2] for row in sql.rows(_FIND, given)}


def delete_vendor_ids(batch: list[UUID], before: datetime) -> int:
    """Delete rows of a batch whose ids are older than their retention time."""
    return sql.execute(_DELETE, {"ids": batch})


_STORE = """
INSERT INTO scheduling_vendormessage (id, channel_id, vendor_id, delivery_key)
SELECT * FROM unnest(%(ids)b::uuid[], %(channels)b::bigint[], %(vendor_ids)b::text[], %(keys)b::uuid[])
ON CONFLICT (channel_id, vendor_id) DO NOTHING
"""
_FIND = """
SELECT m.channel_id, m.vendor_id, m.delivery_key
FROM unnest(%(channels)b::bigint[], %(vendor_ids)b::text[]) AS v(channel_id, vendor_id)
JOIN scheduling_vendormessage AS m ON m.channel_id = v.channel_id AND m.vendor_id = v.vendor_id
"""
_DELETE = "DELETE FROM scheduling_vendormessage WHERE id = ANY(%(ids)b)"
