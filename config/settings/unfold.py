"""Appearance of the back office. All assets are served locally."""

from __future__ import annotations

from typing import Any

from django.templatetags.static import static
from django.urls import reverse_lazy
from django.utils.translation import gettext_lazy as _

UNFOLD: dict[str, Any] = {
    "SITE_TITLE": "Aftertouch",
    "SITE_HEADER": "Aftertouch",
    "SITE_SUBHEADER": _("The right touch at the right moment"),
    "SITE_SYMBOL": "touch_app",
    "SITE_FAVICONS": [
        {"rel": "icon", "type": "image/svg+xml", "href": lambda request: static("scheduling/favicon.svg")}
    ],
    "SITE_URL": None,
    "ENVIRONMENT": "scheduling.admin.navigation.choose_environment_label",
    "SHOW_LANGUAGES": True,
    "SHOW_HISTORY": True,
    "SHOW_VIEW_ON_SITE": False,
    "BORDER_RADIUS": "8px",
    "STYLES": [lambda request: static("scheduling/ops.css"), lambda request: static("rpa_tasks/rpa.css")],
    "SCRIPTS": [
        lambda request: static("scheduling/live.js"),
        lambda request: static("scheduling/keyboard.js"),
        lambda request: static("scheduling/submit_once.js"),
        lambda request: static("scheduling/search.js"),
    ],
    "COLORS": {
        "primary": {
            "50": "oklch(97.9% .012 200)",
            "100": "oklch(95% .03 200)",
            "200": "oklch(90.5% .06 200)",
            "300": "oklch(83% .09 201)",
            "400": "oklch(73% .11 203)",
            "500": "oklch(63% .11 206)",
            "600": "oklch(52.5% .095 209)",
            "700": "oklch(45.5% .08 211)",
            "800": "oklch(39.5% .066 214)",
            "900": "oklch(34.5% .055 216)",
            "950": "oklch(25% .045 220)",
        },
    },
    "GLOBAL_CALLBACK": "scheduling.admin.dashboard.overview.build_page_context",
    "DASHBOARD_CALLBACK": "scheduling.admin.dashboard.overview.build_overview_context",
    "ACCOUNT": {
        "navigation": [
            {"title": _("My account"), "link": reverse_lazy("admin:account")},
            {"title": _("Change password"), "link": reverse_lazy("admin:password_change")},
        ]
    },
    "SIDEBAR": {
        "show_search": False,
        "show_all_applications": False,
        "navigation": "scheduling.admin.navigation.build_sidebar",
    },
}

# Unfold's login form loses the target if it is opened directly.
LOGIN_REDIRECT_URL = "admin:index"
