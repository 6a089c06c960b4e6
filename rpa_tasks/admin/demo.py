"""What the demo flow wrote, to look at."""

from __future__ import annotations

from django.contrib import admin

from rpa_tasks.models import DemoOrder, DemoWatermark
from scheduling.admin.base import ReadOnlyAdmin


@admin.register(DemoOrder)
class DemoOrderAdmin(ReadOnlyAdmin):
    list_display = ("order_no", "shop_id", "status", "buyer", "amount", "version", "writes")
    search_fields = ("=order_no", "=shop_id")


@admin.register(DemoWatermark)
class DemoWatermarkAdmin(ReadOnlyAdmin):
    list_display = ("shop_id", "position", "lease_no")
