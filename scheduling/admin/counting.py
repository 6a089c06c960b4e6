"""Lists that are not counted to their end: nobody turns ten thousand pages."""

from __future__ import annotations

from typing import Any, cast

from django.core.paginator import Paginator
from django.db.models import QuerySet
from django.utils.functional import cached_property

from scheduling.admin.patience import patiently

MOST = 10_000  #: rows that are counted; of more it is only known that there are more


class CappedPaginator(Paginator):  # type: ignore[type-arg]
    """The pages of so many rows. Who needs what lies behind narrows the list down."""

    @cached_property
    def count(self) -> int:
        rows = cast("QuerySet[Any]", self.object_list)
        found = patiently(lambda: rows.order_by()[: MOST + 1].count())
        return MOST + 1 if found is None else found
