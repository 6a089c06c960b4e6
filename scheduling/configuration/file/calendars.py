"""Read and write section `calendars`: working days, holidays, and the send windows of nodes without own ones."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from django.conf import settings

from scheduling.configuration import validation
from scheduling.configuration.file.draft import Draft
from scheduling.configuration.file.rows import RowSection
from scheduling.configuration.file.schema import KEY, Field, ListOf, Text, Whole
from scheduling.error_text import ErrorText as _
from scheduling.errors import FieldError, InvalidInput
from scheduling.models import Calendar
from scheduling.policy.window_forms import WINDOW_KEYS, list_calendars, read_window


class SendWindows:
    """One send window or a list of them, stored as a list."""

    def read(self, given: Any) -> list[dict[str, Any]]:
        if not isinstance(given, list):
            return [read_window(given)]
        found, errors = [], []
        for place, each in enumerate(given):
            try:
                found.append(read_window(each))
            except InvalidInput as error:
                errors += [
                    FieldError(f"[{place}]" + (f".{problem.field}" if problem.field else ""), problem.message)
                    for problem in error.errors
                ]
        if errors:
            raise InvalidInput(*errors)
        return found

    def write(self, stored: Sequence[Mapping[str, Any]]) -> Any:
        written = [{key: each[key] for key in WINDOW_KEYS if key in each} for each in stored]
        return written[0] if len(written) == 1 else written


SEND_WINDOWS = SendWindows()
DAY = Text(10)


class Calendars(RowSection):
    """Calendars in the order of the file; the first is the default."""

    name = "calendars"
    noun = "calendar"
    tables = (Calendar,)
    model = Calendar
    fields = (
        Field("key", KEY),
        Field("position", Whole(), default=0),
        Field("timezone", Text(60), default=settings.TIME_ZONE),
        Field("country", Text(6, empty=True), default="CN"),
        Field("closed", ListOf(DAY), default=[]),
        Field("open", ListOf(DAY), default=[]),
        Field("send_window", SEND_WINDOWS, default=[]),
    )

    def defaults(self, values: Mapping[str, Any], position: int) -> dict[str, Any]:
        return {"position": position}

    def check(self, values: Mapping[str, Any], draft: Draft) -> None:
        validation.check_calendar(values)

    def read_entry(self, entry: dict[str, Any], position: int, path: str, draft: Draft) -> dict[str, Any]:
        values = super().read_entry(entry, position, path, draft)
        check_window_calendars(values.get("send_window"), f"{path}.send_window", draft)
        return values

    def order(self, row: Any) -> Any:
        return (row.position, row.key)


def check_window_calendars(stored: Any, path: str, draft: Draft) -> None:
    """Add a problem for each valid window that names a calendar which does not exist."""
    if draft.has_problem(path):
        return
    for place, key in list_calendars(stored):
        if key not in draft.keys("calendars"):
            inner = f"{path}[{place}]" if len(stored) > 1 else path
            draft.problem(f"{inner}.calendar", _("there is no calendar “%(name)s”", name=key))
