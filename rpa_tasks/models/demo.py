"""Tables of the flow `demo_sync_order`.

Your flow has its own tables with the same two columns, which make a late or repeated run harmless: the version of the
order and the lease number of the writer.
"""

from __future__ import annotations

from django.db import models
from django.utils.translation import gettext_lazy as _
from django.utils.translation import pgettext_lazy


class DemoOrder(models.Model):
    shop_id = models.CharField(_("shop id"), max_length=64)
    order_no = models.CharField(_("order number"), max_length=64)
    version = models.IntegerField(_("version"))
    status = models.CharField(_("status"), max_length=40)
    buyer = models.CharField(_("buyer"), max_length=100)
    amount = models.DecimalField(_("amount"), max_digits=12, decimal_places=2)
    #: Number of writes of this row: an effect counter.
    writes = models.IntegerField(_("writes"), default=1)

    class Meta:
        verbose_name = _("demo order")
        verbose_name_plural = _("demo orders")
        ordering = ["shop_id", "order_no"]
        constraints = [models.UniqueConstraint(fields=["shop_id", "order_no"], name="one_demo_order_a_number")]

    def __str__(self) -> str:
        return self.order_no


class DemoWatermark(models.Model):
    shop_id = models.CharField(_("shop id"), max_length=64, primary_key=True)
    #: The latest change that was read.
    position = models.BigIntegerField(pgettext_lazy("demo shop", "position"), default=0)
    #: The highest lease number that has written; lower ones are refused.
    lease_no = models.IntegerField(_("lease number"), default=0)

    class Meta:
        verbose_name = _("demo watermark")
        verbose_name_plural = _("demo watermarks")

    def __str__(self) -> str:
        return self.shop_id
