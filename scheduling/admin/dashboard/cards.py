"""Define the cards of the overview."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import structlog
from django.http import HttpRequest
from django.utils.functional import Promise
from django.utils.translation import gettext as _

from scheduling.admin.dashboard.charts import Chart
from scheduling.app_integrations import integrations
from scheduling.replica import is_replica_failure

log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class Figure:
    """A labelled number of a card. `value` is None if the count exceeded its time limit."""

    words: str | Promise
    value: Any
    link: str = ""  #: list of the counted rows
    tone: str = ""  #: "bad" if a user must act, "quiet" for explanations
    hint: str | Promise = ""


@dataclass(frozen=True, slots=True)
class DashboardCard:
    title: str | Promise
    figures: list[Figure] = field(default_factory=list)
    link: str = ""
    note: str | Promise = ""  #: error or missing source
    charts: list[Chart] = field(default_factory=list)  #: shown with the other charts


@dataclass(frozen=True, slots=True)
class ActionLine:
    """Work that waits for a person."""

    icon: str
    words: str | Promise
    link: str
    detail: str | Promise = ""
    tone: str = "bad"  #: or "wait"


def format_capped_count(count: int | None, most: int) -> str | None:
    """Format a count, as "10000+" if it exceeds `most`; None if it is unknown."""
    return None if count is None else f"{most}+" if count > most else str(count)


def load_app_cards(request: HttpRequest) -> Iterator[DashboardCard]:
    """Yield the cards of other apps. A card that fails shows an error, so that the page still loads."""
    for build in [build for app in integrations() for build in app.cards]:
        try:
            card = build(request)
        except Exception as error:
            if is_replica_failure(error):
                raise
            log.exception("dashboard_card_failed", card=f"{build.__module__}.{build.__qualname__}")
            card = DashboardCard(
                build.__module__.split(".")[0], note=_("This part could not be loaded. The log contains the reason.")
            )
        if card is not None:
            yield card
