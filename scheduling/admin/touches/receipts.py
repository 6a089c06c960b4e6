"""Show receipts: figures of a node, the kinds of a touch in the CSV export, and disabled addresses of a customer."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

from django.conf import settings
from django.contrib.postgres.aggregates import ArrayAgg
from django.db.models import OuterRef, Subquery
from django.utils.translation import gettext as _

from scheduling.admin.count_time_limits import PageTimeLimit
from scheduling.admin.dashboard.cards import Figure
from scheduling.models import Customer, DeliveryReceipt, DisabledTarget, Node, ReceiptKind
from scheduling.models.node import digest_address
from scheduling.receipts import count_delivered_touches, count_receipts
from scheduling.redaction import redact_text

SPAN = timedelta(days=7)


def build_receipt_figures(node: Node) -> list[Figure]:
    """Return the receipts of the last seven days by kind with their share of the delivered touches. [] for none."""
    within = PageTimeLimit(settings.TIMEOUTS.dashboard)
    counts = within(lambda: count_receipts(node.pk, SPAN))
    if counts == {}:
        return []
    delivered = within(lambda: count_delivered_touches(node.pk, SPAN))
    return [
        Figure(
            ReceiptKind(kind).label,
            None if counts is None else counts.get(kind, 0),
            tone="bad" if kind in (ReceiptKind.BOUNCED, ReceiptKind.COMPLAINED) and counts and kind in counts else "",
            hint=_format_receipt_share(counts.get(kind, 0) if counts else None, delivered),
        )
        for kind in ReceiptKind.values
    ]


def _format_receipt_share(count: int | None, delivered: int | None) -> str:
    if count is None or not delivered:
        return ""
    return _("%(share)s %% of %(delivered)s delivered") % {
        "share": f"{100 * count / delivered:.1f}",
        "delivered": delivered,
    }


def receipt_kinds_subquery() -> Subquery:
    """Return the kinds of a touch's receipts."""
    mine = DeliveryReceipt.objects.filter(delivery_key=OuterRef("root_id")).order_by().values("delivery_key")
    return Subquery(mine.annotate(kinds=ArrayAgg("kind")).values("kinds"))


def format_receipt_kinds(row: Any) -> str:
    return ", ".join(str(ReceiptKind(kind).label) for kind in sorted(row.receipt_kinds or ()))


def list_disabled_addresses(customer: Customer) -> list[DisabledTarget]:
    """Return the disabled targets among a customer's addresses, each with its `address_name` and a redacted reason."""
    if not isinstance(customer.addresses, dict) or not customer.addresses:
        return []
    names = {digest_address(address): name for name, address in customer.addresses.items()}
    found = list(DisabledTarget.objects.filter(target_digest__in=names).select_related("channel"))
    for each in found:
        each.address_name = names[each.target_digest]  # type: ignore[attr-defined]
        each.reason = redact_text(each.reason)
    return found
