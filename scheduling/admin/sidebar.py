"""Build the sidebar. Other apps add groups through `settings.ADMIN_MENUS`."""

from __future__ import annotations

from typing import Any

from django.conf import settings
from django.http import HttpRequest
from django.urls import reverse
from django.utils.functional import Promise
from django.utils.module_loading import import_string
from django.utils.translation import gettext_lazy as _

Item = tuple[Any, str, str, str]  #: title, icon, URL name, permission

MENU: list[tuple[str | Promise, list[Item]]] = [
    (
        "",
        [(_("Overview"), "home", "index", "")],
    ),
    (
        _("Outreach"),
        [
            (_("Matrix"), "grid_view", "scheduling_node_matrix", "scheduling.view_node"),
            (_("Nodes"), "account_tree", "scheduling_node_changelist", "scheduling.view_node"),
            (_("Stages"), "conversion_path", "scheduling_stage_changelist", "scheduling.view_stage"),
            (_("Templates"), "chat", "scheduling_template_changelist", "scheduling.view_template"),
            (_("Channels"), "outgoing_mail", "scheduling_channelconfig_changelist", "scheduling.view_channelconfig"),
            (_("Communities"), "groups", "scheduling_community_changelist", "scheduling.view_community"),
            (_("Send preview"), "psychology_alt", "scheduling_event_preview", "scheduling.view_event"),
            (_("What-if replay"), "history_toggle_off", "scheduling_whatifrun_changelist",
             "scheduling.view_whatifrun"),
            (_("Guarded roll-outs"), "stairs", "scheduling_guardedrollout_changelist",
             "scheduling.view_guardedrollout"),
            (_("Effect"), "trending_up", "scheduling_node_conversion", "scheduling.view_touch"),
        ],
    ),
    (
        _("Rules"),
        [
            (_("Delay rule"), "timer", "scheduling_delayrule_changelist", "scheduling.view_delayrule"),
            (_("Anti-harassment"), "shield_person", "scheduling_harassmentrule_changelist",
             "scheduling.view_harassmentrule"),
            (_("Event types"), "label", "scheduling_eventtype_changelist", "scheduling.view_eventtype"),
            (_("Alerts"), "notifications_active", "scheduling_alertreceiver_changelist",
             "scheduling.view_alertreceiver"),
        ],
    ),
    (
        _("Work"),
        [
            (_("Touches"), "send", "scheduling_touch_changelist", "scheduling.view_touch"),
            (_("Failed tasks"), "error", "scheduling_failedtask_changelist", "scheduling.view_failedtask"),
            (_("Bulk actions"), "checklist", "scheduling_bulkaction_changelist", "scheduling.view_bulkaction"),
            (_("Events"), "bolt", "scheduling_event_changelist", "scheduling.view_event"),
            (_("Customers"), "person", "scheduling_customer_changelist", "scheduling.view_customer"),
            (_("Complaints"), "sentiment_dissatisfied", "scheduling_complaint_changelist",
             "scheduling.view_complaint"),
            (_("Pauses"), "pause_circle", "scheduling_pause_changelist", "scheduling.view_pause"),
        ],
    ),
    (
        _("Access"),
        [
            (_("API keys"), "key", "scheduling_apikey_changelist", "scheduling.view_apikey"),
            (_("Users"), "manage_accounts", "auth_user_changelist", "auth.view_user"),
            (_("Groups"), "badge", "auth_group_changelist", "auth.view_group"),
            (_("Failed logins"), "lock_person", "scheduling_failedlogin_changelist", "scheduling.view_failedlogin"),
        ],
    ),
    (
        _("Schedules"),
        [
            (_("Periodic tasks"), "schedule", "django_celery_beat_periodictask_changelist",
             "django_celery_beat.view_periodictask"),
            (_("Intervals"), "repeat", "django_celery_beat_intervalschedule_changelist",
             "django_celery_beat.view_intervalschedule"),
            (_("Crontabs"), "calendar_clock", "django_celery_beat_crontabschedule_changelist",
             "django_celery_beat.view_crontabschedule"),
            (_("Fixed times"), "alarm", "django_celery_beat_clockedschedule_changelist",
             "django_celery_beat.view_clockedschedule"),
        ],
    ),
]  # fmt: skip


def build_sidebar(request: HttpRequest) -> list[dict[str, Any]]:
    """Return the groups of the sidebar. The entry of the current page is marked as active."""
    menu = [*MENU]
    for path in getattr(settings, "ADMIN_MENUS", ()):
        menu[-2:-2] = import_string(path)
    links = {name: reverse(f"admin:{name}") for _title, items in menu for _text, _icon, name, _needs in items}
    here = _find_current_entry(request.path, links)
    return [
        {
            "title": title,
            "separator": bool(title),
            "items": [
                {
                    "title": text, "icon": icon, "link": links[name], "active": name == here,
                    "permission": (lambda request, needs=needs: not needs or request.user.has_perm(needs)),
                }
                for text, icon, name, needs in items
            ],
        }
        for title, items in menu
    ]  # fmt: skip


def _find_current_entry(path: str, links: dict[str, str]) -> str:
    """Return the entry with the longest address that is a prefix of `path`.

    The matrix is thus not marked as "nodes" too.
    """
    fitting = [name for name, link in links.items() if path.startswith(link) and (name != "index" or path == link)]
    return max(fitting, key=lambda name: len(links[name]), default="")
