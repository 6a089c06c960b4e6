"""Disable the addresses of customers that bounced for good."""

from __future__ import annotations

from collections.abc import Iterable
from datetime import datetime

from django.utils.encoding import punycode

from scheduling.channels.kinds import channel_kinds
from scheduling.configuration import snapshot
from scheduling.models import Customer, CustomerChange
from scheduling.planning.disabled_targets import digest_address, store_disabled_targets
from scheduling.policy.specs import ChannelSpec

Bounce = tuple[int, int, datetime, str, str]  #: node id, customer id, time of the touch, address, detail


def disable_bounced_targets(bounces: Iterable[Bounce]) -> None:
    """Disable the addresses at which the messages bounced.

    Without the bounced address it is the customer's present one. If that was changed after the touch, the bounce is not
    about it. Idempotent.
    """
    store_disabled_targets(
        (spec.id, digest_address(address), "", f"bounced: {detail}"[:200])
        for spec, address, detail in map(_find_bounced_address, bounces)
        if spec and address
    )


def _find_bounced_address(bounce: Bounce) -> tuple[ChannelSpec | None, str, str]:
    node_id, customer_id, since, given, detail = bounce
    node = snapshot.current().nodes.get(node_id)
    kind = channel_kinds().get(node.channel.kind) if node else None
    if node is None or kind is None:
        return None, "", ""
    field = kind.address_key or _read_address_key(node.channel)
    row = Customer.objects.filter(pk=customer_id).first()
    present = str(row.addresses.get(field) or "") if row and field and isinstance(row.addresses, dict) else ""
    if given:
        return node.channel, present if _encode_domain(present) == _encode_domain(given) else "", detail
    changed = CustomerChange.objects.filter(customer=customer_id, at__gt=since, after__has_key="addresses").exists()
    return node.channel, "" if changed else present, detail


def _encode_domain(address: str) -> str:
    """Return an address as mail servers write it: `ann@xn--fsqu00a.cn` for `ann@例子.cn`."""
    name, at, domain = address.lower().rpartition("@")
    try:
        return f"{name}{at}{punycode(domain)}"
    except UnicodeError:  # no domain
        return f"{name}{at}{domain}"


def _read_address_key(spec: ChannelSpec) -> str:
    """Return the key of a declared HTTP channel's address."""
    return str(spec.config.get("address") or "")
