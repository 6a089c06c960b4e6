"""Show instants, states, stored ids and links to rows, the same on every page.

Templates use the filters `instant` and `shown_id`.
"""

from __future__ import annotations

from datetime import datetime
from typing import Any

from django.db.models import Model
from django.template import Library
from django.urls import reverse
from django.utils.formats import date_format
from django.utils.html import conditional_escape, format_html
from django.utils.safestring import SafeString, mark_safe
from django.utils.timezone import localdate, localtime

from scheduling.ids import reveal_odd_characters

register = Library()
register.filter("shown_id", reveal_odd_characters)


def describe_instant(at: datetime) -> str:
    """Return an instant with its offset, such as `2026-11-29 08:00:00 +08:00`, for texts that hold no markup."""
    local = localtime(at)
    return f"{local:%Y-%m-%d %H:%M:%S} {local.isoformat(timespec='seconds')[19:]}"


def render_time(at: datetime, text: Any) -> SafeString:
    """Return a text that stands for an instant, with the instant as its title."""
    machine = localtime(at).isoformat(timespec="seconds")
    return format_html('<time datetime="{}" title="{}">{}</time>', machine, describe_instant(at), text)


@register.filter("instant")
def format_instant(at: datetime | None, form: str = "Y-m-d H:i:s") -> SafeString | str:
    """Format an instant in the installation's time zone; "–" for None."""
    return render_time(at, date_format(localtime(at), form)) if at else "–"


def format_moment(at: datetime) -> str:
    """Format an instant of today as `11:40`, another with its date, in the server's time zone."""
    local = localtime(at)
    return format_instant(at, "H:i" if local.date() == localdate() else "Y-m-d H:i")


def find_address(row: Model) -> str:
    """Return the address of a row's page."""
    return reverse(f"admin:{row._meta.app_label}_{row._meta.model_name}_change", args=[row.pk])


def render_link(address: str, text: Any) -> SafeString:
    return format_html('<a class="at-link" href="{}">{}</a>', address, text)


def render_tag(text: Any, tone: str = "") -> SafeString:
    """Render a state; `tone` is `success`, `info`, `warning` or `danger`; any other is neutral."""
    return format_html('<span class="at-tag {}">{}</span>', tone, text)


def insert_values(words: str, **values: Any) -> SafeString:
    """Insert values into a translated text. Markup of safe values stays; all else is escaped."""
    escaped = {name: conditional_escape(value) for name, value in values.items()}
    return mark_safe(conditional_escape(words) % escaped)  # noqa: S308 (each part is escaped)
