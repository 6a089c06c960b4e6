"""Figures on the overview. Other apps add cards of their own through `settings.DASHBOARD`: dotted paths of functions
that are given the request and answer with a card, or None for who may not see it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import structlog
from django.conf import settings
from django.http import HttpRequest
from django.utils.functional import Promise
from django.utils.module_loading import import_string
from django.utils.translation import gettext as _

from scheduling.admin.dashboard.charts import Chart

log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class Figure:
    """A number with its words. `value` None: too much to count now."""

    words: str | Promise
    value: Any
    link: str = ""  #: the rows behind it
    tone: str = ""  #: "bad" for what somebody should look at, "quiet" for what only explains
    hint: str | Promise = ""


@dataclass(frozen=True, slots=True)
class Card:
    title: str | Promise
    figures: list[Figure] = field(default_factory=list)
    link: str = ""
    note: str | Promise = ""  #: what is wrong, or what is missing
    charts: list[Chart] = field(default_factory=list)  #: they stand with the other charts


def capped(count: int | None, most: int) -> str | None:
    return None if count is None else f"{most}+" if count > most else str(count)


def cards_of_others(request: HttpRequest) -> Iterator[Card]:
    """A card that breaks says so, and the page opens."""
    for path in settings.DASHBOARD:
        try:
            card = import_string(path)(request)
        except Exception:
            log.exception("card_failed", path=path)
            card = Card(path.split(".")[0], note=_("This part could not be read; the log says why."))
        if card is not None:
            yield card
