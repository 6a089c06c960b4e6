"""Find the channel instance and the receiver address of a touch, and the disabled ones among them."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Mapping
from contextlib import suppress
from typing import Any, NamedTuple, cast
from uuid import UUID

from scheduling.channels.base import Channel, Message, find_escape
from scheduling.channels.kinds import channel_kinds
from scheduling.channels.quota import receiver_key
from scheduling.models import Community
from scheduling.models.encrypted import Sealed, Unreadable
from scheduling.planning.disabled_targets import Target, channels_with_disabled, digest_address, find_disabled
from scheduling.policy.specs import ChannelSpec, CustomerSpec


class NoTarget(Exception):
    """A touch has no usable address. `reason` is the code of its failure."""

    def __init__(self, reason: str, detail: str = "") -> None:
        super().__init__(detail or reason)
        self.reason = reason


class Route(NamedTuple):
    """The channel and the target of a touch."""

    channel: Channel
    target: Mapping[str, Any]
    receiver: str = ""  #: key of the receiver's lane; empty: not known yet
    vendor_key: str = ""  #: key by which the quotas of the channel count


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
        channel.quotas = (*channel.quotas, *spec.limits)  # type: ignore[misc] # for this row only
    _channels[spec.id] = (spec, channel)
    return channel


def find_preview_escape(spec: ChannelSpec) -> Callable[[str], str]:
    """Return the escape of a channel's format; that of plain text if the channel cannot be used here."""
    try:
        return find_escape(channel_of(spec))
    except (NoTarget, Unreadable):
        return str


def target_for(
    spec: ChannelSpec,
    channel: Channel,
    customer: CustomerSpec,
    chat_id: str,
    communities: Mapping[str, Mapping[str, Any]],
    disabled: Container[Target] | None = None,
) -> Mapping[str, Any]:
    """Return the community's target or the customer's address.

    `disabled` holds the disabled targets of the batch (see `disabled_targets`). Without it this one target is looked
    up.

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
    if disabled is None:
        disabled = find_disabled([(spec.id, target_digest(spec, target))])
    if disabled and (spec.id, target_digest(spec, target)) in disabled:
        raise NoTarget("target_disabled", "the vendor answered that this receiver is gone")
    return target


def find_route(
    spec: ChannelSpec,
    customer: CustomerSpec,
    chat_id: str,
    communities: Mapping[str, Mapping[str, Any]],
    disabled: Container[Target],
) -> Route | None:
    """Return the route of a touch before its message exists. None: judging or the sender will report why not."""
    try:
        channel = channel_of(spec)
        target = target_for(spec, channel, customer, chat_id, communities, disabled)
        blank = Message(
            _NONE, _NONE, customer.user_id, chat_id, "", "", "", "", "", "", {},
            target=target, spoke_at=customer.conversation_at,
        )  # fmt: skip
        vendor_key = receiver_key(channel, blank) if channel.quotas else ""
        return Route(channel, target, lane_key(spec, channel, blank), vendor_key)
    except Exception:
        return None


def lane_key(spec: ChannelSpec, channel: Channel, message: Message) -> str:
    """Return the key of the lane to a receiver: each channel row has a lane of its own."""
    return f"{spec.id}:{channel.target_key(message)}"


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
