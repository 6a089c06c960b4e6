"""Which channel instance, and where to."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from hashlib import sha256
from typing import Any, cast

from scheduling.channels.base import Channel
from scheduling.channels.registry import channel_kinds
from scheduling.configuration import Snapshot
from scheduling.models import Community
from scheduling.models.secret import Sealed
from scheduling.specs import ChannelSpec, CustomerSpec


class NoTarget(Exception):
    """There is nowhere to send it. `reason` is the code the touch fails with."""

    def __init__(self, reason: str, detail: str = "") -> None:
        super().__init__(detail or reason)
        self.reason = reason


_channels: dict[int, tuple[ChannelSpec, Channel]] = {}


def channel_of(spec: ChannelSpec) -> Channel:
    """The channel as configured now, one instance a process and setting. Raises `NoTarget` where it cannot work,
    `Unreadable` where this node has not the key for its settings."""
    known = _channels.get(spec.id)
    if known and known[0] == spec:
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
    _channels[spec.id] = (spec, channel)
    return channel


def target_for(
    spec: ChannelSpec,
    channel: Channel,
    customer: CustomerSpec,
    chat_id: str,
    communities: Mapping[str, Mapping[str, Any]],
    config: Snapshot,
) -> Mapping[str, Any]:
    """The community's target or the customer's address. Raises `NoTarget` where there is none or it is gone."""
    if channel.address_key:
        address = customer.addresses.get(channel.address_key)
        target = {"address": address} if address else {}
    else:
        targets = communities.get(chat_id, {})
        target = targets.get(spec.key) or targets.get(spec.kind) or {}
    if channel.needs_target and not target:
        raise NoTarget("no_target", f"no {spec.kind} target for {chat_id or customer.user_id}")
    if config.disabled_targets and (spec.id, target_digest(spec, target)) in config.disabled_targets:
        raise NoTarget("target_disabled", "the receiver said that it is gone (410)")
    return target


def target_digest(spec: ChannelSpec, target: Mapping[str, Any]) -> str:
    """A name for a receiver that does not give away its address."""
    address = target.get("url") or target.get("address") or spec.config.get("url") or spec.key
    return sha256(str(address).encode()).hexdigest()


def community_targets(chat_ids: Iterable[str]) -> dict[str, Mapping[str, Any]]:
    """Where messages for these communities go, by channel key or kind."""
    wanted = sorted({chat_id for chat_id in chat_ids if chat_id})
    if not wanted:
        return {}
    rows = Community.objects.filter(chat_id__in=wanted, retired_at=None).values_list("chat_id", "targets")
    return {chat_id: cast(Mapping[str, Any], targets) for chat_id, targets in rows}
