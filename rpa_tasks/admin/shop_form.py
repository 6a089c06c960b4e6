"""The form of a shop."""

from __future__ import annotations

from typing import Any, ClassVar

from django.utils.translation import gettext_lazy as _

from rpa_tasks.configuration.validation import check_shop, profiles
from rpa_tasks.models import Shop
from scheduling.admin.base import CheckedForm


class ShopForm(CheckedForm):
    """Pausing and logging in are buttons: who saves an old form must not start or stop anything."""

    class Meta:
        model = Shop
        exclude = ("version", "retired_at", "paused", "login_state", "login_lost_at")
        help_texts: ClassVar[Any] = {
            "shop_id": _("The platform's own id of the shop; it can't be changed later."),
            "profile_id": _(
                "Empty: the platform's key, “-” and the shop id. Its browser keeps its login there; never shared."
            ),
            "dedicated_queue": _("Its work leaves the shared queues for s.PLATFORM.SHOP: a node must consume it."),
            "backlog_limit": _("More are refused while so many wait."),
        }

    def check(self, values: Any, /) -> None:  # type: ignore[override]
        platform = values.get("platform") or getattr(self.instance, "platform", None)
        known = {
            "platform": platform.key if platform else "",
            "shop_id": values.get("shop_id") or self.instance.shop_id,
        }
        others = Shop.objects.select_related("platform").exclude(pk=self.instance.pk)
        check_shop({**values, **known}, profiles(others))
