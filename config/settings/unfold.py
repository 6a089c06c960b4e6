"""The look of the back office."""

from __future__ import annotations

from django.utils.translation import gettext_lazy as _

UNFOLD = {
    "SITE_TITLE": "Aftertouch",
    "SITE_HEADER": "Aftertouch",
    "SITE_SUBHEADER": _("The right touch at the right moment"),
    "SHOW_LANGUAGES": True,
}
