"""Build the menu: the entries of the sidebar, the tabs of a page, and the place of a page in it.

Other apps add groups (`Integration.menu`). A tab names a page once for the menu, its heading and its title.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from django.conf import settings
from django.http import HttpRequest
from django.urls import reverse
from django.utils.functional import Promise
from django.utils.translation import gettext_lazy as _

from scheduling.admin.page_reads import count_within
from scheduling.app_integrations import integrations
from scheduling.models import Alert, FailedTask, Pause

Text = str | Promise
MOST_COUNTED = 99  #: a badge shows larger numbers as 99+


@dataclass(frozen=True, slots=True)
class Tab:
    """A page of the menu, with the permission that its visitors need."""

    title: Text
    name: str  #: of its address
    needs: str = ""

    @property
    def link(self) -> str:
        return reverse(f"admin:{self.name}")

    def is_open_to(self, user: Any) -> bool:
        return not self.needs or user.has_perm(self.needs)


@dataclass(frozen=True, slots=True)
class Entry:
    """An entry of the sidebar. It leads to the first tab that the user may open."""

    icon: str
    tabs: tuple[Tab, ...]
    own_title: Text = ""  #: empty: the title of the first tab
    #: Count the rows that wait for a person, up to `MOST_COUNTED` + 1, for users who may open the first tab.
    count: Callable[[], int] | None = None
    counted: Text = ""  #: what the number is about

    @property
    def title(self) -> Text:
        return self.own_title or self.tabs[0].title


Group = tuple[Text, tuple[Entry, ...]]


@dataclass(frozen=True, slots=True)
class Place:
    """Where a page is in the menu. `tabs` are those that the user may open."""

    entry: Entry
    tab: Tab
    tabs: tuple[Tab, ...]
    is_tab: bool  #: the page is the tab itself, not one below it

    @property
    def link(self) -> str:
        return self.tabs[0].link if self.tabs else ""


def count_open_failures() -> int:
    return FailedTask.objects.filter(state="open").order_by()[: MOST_COUNTED + 1].count()


def count_alerts() -> int:
    return Alert.objects.filter(ended_at=None)[: MOST_COUNTED + 1].count()


def count_pauses() -> int:
    return Pause.objects.all()[: MOST_COUNTED + 1].count()


OVERVIEW: Group = (
    "",
    (
        Entry(
            "home",
            (
                Tab(_("Overview"), "index"),
                Tab(_("Queues and workers"), "scheduling_touch_workers", "scheduling.view_touch"),
            ),
        ),
    ),
)
CORE: tuple[Group, ...] = (
    (
        _("To do"),
        (
            Entry(
                "error",
                (
                    Tab(_("Failed tasks"), "scheduling_failedtask_changelist", "scheduling.view_failedtask"),
                    Tab(_("Causes"), "scheduling_failedtask_groups", "scheduling.view_failedtask"),
                    Tab(_("Bulk actions"), "scheduling_bulkaction_changelist", "scheduling.view_bulkaction"),
                ),
                count=count_open_failures, counted=_("open"),
            ),
            Entry(
                "notifications_active",
                (Tab(_("Alerts"), "scheduling_alertreceiver_changelist", "scheduling.view_alertreceiver"),),
                count=count_alerts, counted=_("active"),
            ),
            Entry(
                "pause_circle",
                (Tab(_("Pauses"), "scheduling_pause_changelist", "scheduling.view_pause"),),
                count=count_pauses, counted=_("paused"),
            ),
        ),
    ),
    (
        _("Outreach"),
        (
            Entry(
                "grid_view",
                (
                    Tab(_("Matrix"), "scheduling_node_matrix", "scheduling.view_node"),
                    Tab(_("Nodes"), "scheduling_node_changelist", "scheduling.view_node"),
                    Tab(_("Stages"), "scheduling_stage_changelist", "scheduling.view_stage"),
                ),
            ),
            Entry("chat", (Tab(_("Templates"), "scheduling_template_changelist", "scheduling.view_template"),)),
            Entry(
                "outgoing_mail",
                (
                    Tab(_("Channels"), "scheduling_channelconfig_changelist", "scheduling.view_channelconfig"),
                    Tab(_("Receivers"), "scheduling_channelconfig_receivers", "scheduling.view_channelconfig"),
                    Tab(_("Communities"), "scheduling_community_changelist", "scheduling.view_community"),
                ),
            ),
            Entry(
                "shield_person",
                (
                    Tab(_("Anti-harassment"), "scheduling_harassmentrule_changelist",
                        "scheduling.view_harassmentrule"),
                    Tab(_("Delay rule"), "scheduling_delayrule_changelist", "scheduling.view_delayrule"),
                    Tab(_("Global hold-out"), "scheduling_holdout_changelist", "scheduling.view_holdout"),
                    Tab(_("Calendars"), "scheduling_calendar_changelist", "scheduling.view_calendar"),
                    Tab(_("Event types"), "scheduling_eventtype_changelist", "scheduling.view_eventtype"),
                ),
                own_title=_("Rules"),
            ),
            Entry(
                "psychology_alt",
                (
                    Tab(_("Send preview"), "scheduling_event_preview", "scheduling.view_event"),
                    Tab(_("My draft"), "scheduling_configdraft_mine", "scheduling.add_configdraft"),
                    Tab(_("All drafts"), "scheduling_configdraft_changelist", "scheduling.view_configdraft"),
                ),
                own_title=_("Trials"),
            ),
            Entry(
                "trending_up",
                (
                    Tab(_("Conversion"), "scheduling_node_conversion", "scheduling.view_touch"),
                    Tab(_("Complaint rates"), "scheduling_complaint_rates", "scheduling.view_complaint"),
                ),
                own_title=_("Effect"),
            ),
        ),
    ),
    (
        _("Records"),
        (
            Entry(
                "send",
                (
                    Tab(_("Touches"), "scheduling_touch_changelist", "scheduling.view_touch"),
                    Tab(_("Events"), "scheduling_event_changelist", "scheduling.view_event"),
                ),
            ),
            Entry(
                "person",
                (
                    Tab(_("Customers"), "scheduling_customer_changelist", "scheduling.view_customer"),
                    Tab(_("Customer imports"), "scheduling_customerimport_changelist",
                        "scheduling.view_customerimport"),
                    Tab(_("Complaints"), "scheduling_complaint_changelist", "scheduling.view_complaint"),
                ),
            ),
        ),
    ),
)  # fmt: skip
SETTINGS: Group = (
    _("Settings"),
    (
        Entry(
            "webhook",
            (
                Tab(_("Webhooks"), "scheduling_webhooksubscription_changelist", "scheduling.view_webhooksubscription"),
                Tab(_("Webhook messages"), "scheduling_webhookmessage_changelist", "scheduling.view_webhookmessage"),
            ),
        ),
        Entry(
            "schedule",
            (
                Tab(_("Periodic tasks"), "django_celery_beat_periodictask_changelist",
                    "django_celery_beat.view_periodictask"),
                Tab(_("Intervals"), "django_celery_beat_intervalschedule_changelist",
                    "django_celery_beat.view_intervalschedule"),
                Tab(_("Crontabs"), "django_celery_beat_crontabschedule_changelist",
                    "django_celery_beat.view_crontabschedule"),
                Tab(_("Fixed times"), "django_celery_beat_clockedschedule_changelist",
                    "django_celery_beat.view_clockedschedule"),
            ),
        ),
        Entry(
            "manage_accounts",
            (
                Tab(_("Users"), "auth_user_changelist", "auth.view_user"),
                Tab(_("Invitations"), "scheduling_invitation_changelist", "scheduling.view_invitation"),
                Tab(_("Groups"), "auth_group_changelist", "auth.view_group"),
                Tab(_("API keys"), "scheduling_apikey_changelist", "scheduling.view_apikey"),
                Tab(_("Failed logins"), "scheduling_failedlogin_changelist", "scheduling.view_failedlogin"),
                Tab(_("Audit log"), "scheduling_auditentry_changelist", "scheduling.view_auditentry"),
            ),
            own_title=_("Access"),
        ),
    ),
)  # fmt: skip


def list_menu_groups() -> tuple[Group, ...]:
    """Return the groups of the menu, those of other apps before the settings."""
    return (OVERVIEW, *CORE, *(group for app in integrations() for group in app.menu), SETTINGS)


def iterate_open_entries(user: Any) -> Iterator[tuple[Text, Entry, tuple[Tab, ...]]]:
    """Yield group, entry and tabs that the user may open; entries without such a tab are left out."""
    for group, entries in list_menu_groups():
        for entry in entries:
            if tabs := tuple(tab for tab in entry.tabs if tab.is_open_to(user)):
                yield group, entry, tabs


def find_menu_place(request: HttpRequest) -> Place | None:
    """Return the tab with the longest address that starts the request's path; None outside the menu.

    The matrix is thus not a page below "Nodes" too.
    """
    best, place = "", None
    for _group, entries in list_menu_groups():
        for entry in entries:
            for tab in entry.tabs:
                link = tab.link
                is_tab = request.path == link
                if (is_tab or (tab.name != "index" and request.path.startswith(link))) and len(link) > len(best):
                    tabs = tuple(each for each in entry.tabs if each.is_open_to(request.user))
                    best, place = link, Place(entry, tab, tabs, is_tab)
    return place


def build_sidebar(request: HttpRequest) -> list[dict[str, Any]]:
    """Return the groups of the sidebar. The entry of the current page is marked as active."""
    place = find_menu_place(request)
    allowed = list(iterate_open_entries(request.user))
    badges = _count_badges([entry for _group, entry, tabs in allowed if entry.count and tabs[0] is entry.tabs[0]])
    groups: dict[Text, dict[str, Any]] = {}
    for title, entry, tabs in allowed:
        group = groups.setdefault(title, {"title": title, "items": []})
        count = badges.get(entry, 0)
        group["items"].append(
            {
                "title": entry.title, "icon": entry.icon, "link": tabs[0].link,
                "active": place is not None and place.entry is entry, "counted": entry.counted,
                "badge": f"{MOST_COUNTED}+" if count > MOST_COUNTED else count,
            }
        )  # fmt: skip
    if may_open_flower(request.user):
        flower = {"title": "Flower", "icon": "local_florist", "link": reverse("flower"), "active": False, "badge": 0}
        groups[SETTINGS[0]]["items"].append(flower)
    return list(groups.values())


def may_see_workers(user: Any) -> bool:
    return bool(user.has_perm("scheduling.view_touch"))


def may_open_flower(user: Any) -> bool:
    """Return whether the user is an administrator and this process knows the login of Flower."""
    return bool(settings.FLOWER_LOGIN and user.is_active and user.is_superuser)


def _count_badges(entries: list[Entry]) -> dict[Entry, int]:
    """Return the counts of the entries; none if they exceed the time limit of a count."""
    return count_within(lambda: {entry: entry.count() for entry in entries if entry.count}) or {}


def choose_environment_label(request: HttpRequest) -> tuple[str, str] | None:
    """Return the name of this installation and its tone: red for production."""
    name = settings.AFTERTOUCH_ENVIRONMENT
    return (name, "danger" if name.lower().startswith("prod") else "info") if name else None
