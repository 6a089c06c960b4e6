"""The menu of the back office, and the search of every page (Ctrl+K)."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import islice
from operator import mod
from typing import Any

from django.conf import settings
from django.contrib import admin
from django.db.models import Q, QuerySet
from django.http import HttpRequest, HttpResponse
from django.template.response import TemplateResponse
from django.urls import reverse
from django.utils.functional import Promise
from django.utils.html import format_html_join
from django.utils.http import urlencode
from django.utils.translation import get_language, gettext, override
from django.utils.translation import gettext_lazy as _
from django.views.decorators.cache import never_cache
from django.views.decorators.http import require_safe

from scheduling import sql
from scheduling.admin.labels import translate_reason
from scheduling.admin.page_reads import PageTimeLimit, count_within
from scheduling.admin.shown_values import find_address, format_instant
from scheduling.admin.touches.pause import describe_scope
from scheduling.app_integrations import integrations
from scheduling.customers.changes import MAX_TERM, find_first_customers
from scheduling.ids import parse_uuid, reveal_odd_characters
from scheduling.models import Alert, ChannelConfig, Community, Customer, Event, FailedTask, Node, Pause, Template, Touch
from scheduling.operations.queries import find_events_by_term

# Build the menu: the entries of the sidebar, the tabs of a page, and the place of a page in it.
#
# Other apps add groups (`Integration.menu`). A tab names a page once for the menu, its heading and its title.


Text = str | Promise
MOST_COUNTED = 99  #: a badge shows larger numbers as 99+


@dataclass(frozen=True, slots=True)
class Tab:
    """A page of the menu."""

    title: Text
    name: str  #: of its address
    own_permission: str = ""  #: that visitors need; of a list without one, that to view its rows

    @property
    def link(self) -> str:
        return reverse(f"admin:{self.name}")

    def is_open_to(self, user: Any) -> bool:
        app, _under, model = self.name.removesuffix("_changelist").rpartition("_")
        needs = self.own_permission or (f"{app}.view_{model}" if self.name.endswith("_changelist") else "")
        return not needs or user.has_perm(needs)


@dataclass(frozen=True, slots=True)
class Entry:
    """An entry of the sidebar. It leads to the first tab that the user may open."""

    icon: str
    tabs: tuple[Tab, ...]
    own_title: Text = ""  #: empty: the title of the first tab
    #: The rows that wait for a person, which are counted for users who may open the first tab.
    waiting: Callable[[], QuerySet[Any]] | None = None
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
                    Tab(_("Failed tasks"), "scheduling_failedtask_changelist"),
                    Tab(_("Causes"), "scheduling_failedtask_groups", "scheduling.view_failedtask"),
                    Tab(_("Bulk actions"), "scheduling_bulkaction_changelist"),
                ),
                waiting=lambda: FailedTask.objects.filter(state="open"),
                counted=_("open"),
            ),
            Entry(
                "notifications_active",
                (Tab(_("Alerts"), "scheduling_alertreceiver_changelist"),),
                waiting=lambda: Alert.objects.filter(ended_at=None), counted=_("active"),
            ),
            Entry(
                "pause_circle",
                (Tab(_("Pauses"), "scheduling_pause_changelist"),),
                waiting=Pause.objects.all, counted=_("paused"),
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
                    Tab(_("Nodes"), "scheduling_node_changelist"),
                    Tab(_("Stages"), "scheduling_stage_changelist"),
                ),
            ),
            Entry("chat", (Tab(_("Templates"), "scheduling_template_changelist"),)),
            Entry(
                "outgoing_mail",
                (
                    Tab(_("Channels"), "scheduling_channelconfig_changelist"),
                    Tab(_("Receivers"), "scheduling_channelconfig_receivers", "scheduling.view_channelconfig"),
                    Tab(_("Communities"), "scheduling_community_changelist"),
                ),
            ),
            Entry(
                "shield_person",
                (
                    Tab(_("Anti-harassment"), "scheduling_harassmentrule_changelist"),
                    Tab(_("Delay rule"), "scheduling_delayrule_changelist"),
                    Tab(_("Global hold-out"), "scheduling_holdout_changelist"),
                    Tab(_("Calendars"), "scheduling_calendar_changelist"),
                    Tab(_("Event types"), "scheduling_eventtype_changelist"),
                ),
                own_title=_("Rules"),
            ),
            Entry(
                "psychology_alt",
                (
                    Tab(_("Send preview"), "scheduling_event_preview", "scheduling.view_event"),
                    Tab(_("My draft"), "scheduling_configdraft_mine", "scheduling.add_configdraft"),
                    Tab(_("All drafts"), "scheduling_configdraft_changelist"),
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
                    Tab(_("Touches"), "scheduling_touch_changelist"),
                    Tab(_("Events"), "scheduling_event_changelist"),
                ),
            ),
            Entry(
                "person",
                (
                    Tab(_("Customers"), "scheduling_customer_changelist"),
                    Tab(_("Customer imports"), "scheduling_customerimport_changelist"),
                    Tab(_("Complaints"), "scheduling_complaint_changelist"),
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
                Tab(_("Webhooks"), "scheduling_webhooksubscription_changelist"),
                Tab(_("Webhook messages"), "scheduling_webhookmessage_changelist"),
            ),
        ),
        Entry(
            "schedule",
            (
                Tab(_("Periodic tasks"), "django_celery_beat_periodictask_changelist"),
                Tab(_("Intervals"), "django_celery_beat_intervalschedule_changelist"),
                Tab(_("Crontabs"), "django_celery_beat_crontabschedule_changelist"),
                Tab(_("Fixed times"), "django_celery_beat_clockedschedule_changelist"),
            ),
        ),
        Entry(
            "manage_accounts",
            (
                Tab(_("Users"), "auth_user_changelist"),
                Tab(_("Invitations"), "scheduling_invitation_changelist"),
                Tab(_("Groups"), "auth_group_changelist"),
                Tab(_("API keys"), "scheduling_apikey_changelist"),
                Tab(_("Failed logins"), "scheduling_failedlogin_changelist"),
                Tab(_("Audit log"), "scheduling_auditentry_changelist"),
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
    waiting = {entry: entry.waiting for _group, entry, tabs in allowed if entry.waiting and tabs[0] is entry.tabs[0]}
    # No badges if the counts exceed the time limit.
    badges = count_within(
        lambda: {entry: rows().order_by()[: MOST_COUNTED + 1].count() for entry, rows in waiting.items()}
    )
    groups: dict[Text, dict[str, Any]] = {}
    for title, entry, tabs in allowed:
        group = groups.setdefault(title, {"title": title, "items": []})
        count = (badges or {}).get(entry, 0)
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


def may_open_flower(user: Any) -> bool:
    """Return whether the user is an administrator and this process knows the login of Flower."""
    return bool(settings.FLOWER_LOGIN and user.is_active and user.is_superuser)


def choose_environment_label(request: HttpRequest) -> tuple[str, str] | None:
    """Return the name of this installation and its tone: red for production."""
    name = settings.AFTERTOUCH_ENVIRONMENT
    return (name, "danger" if name.lower().startswith("prod") else "info") if name else None


# Find pages, actions, configuration and records by one term: the search of every page (Ctrl+K).
#
# A finder runs only for users with its permission. Other apps add finders (`Integration.searches`). All statements
# together take at most `TIMEOUTS.search`.


MOST_FOUND = 6  #: of one finder
MOST_READ = 2_000  #: rows of a configuration table
SEARCHED_EVENTS = 10_000  #: latest events whose order ids are read: no index has them


@dataclass(frozen=True, slots=True)
class Found:
    kind: Text
    icon: str
    title: str
    link: str
    detail: str = ""


#: The permission that its results need, and the function of request and term.
Finder = tuple[str, Callable[[HttpRequest, str], Iterable[Found]]]


@never_cache
@require_safe
def answer_search(request: HttpRequest) -> HttpResponse:
    """Return the list of results for `s` as HTML without a frame."""
    term = request.GET.get("s", "").strip()[:MAX_TERM]
    found, complete = search_everything(request, term) if term else ([], True)
    context = {"results": found, "term": term, "complete": complete}
    return TemplateResponse(request, "ops/search_results.html", context)


def search_everything(request: HttpRequest, term: str) -> tuple[list[Found], bool]:
    """Return what the user may view, and whether every finder ended within the time limit."""
    limit, complete = PageTimeLimit(settings.TIMEOUTS.search), True
    found: dict[str, Found] = {}  #: by link; the first finder names it
    others = [finder for app in integrations() for finder in app.searches]
    for needs, find in (*FINDERS, *others, *SLOW_FINDERS):
        if needs and not request.user.has_perm(needs):
            continue
        rows = limit(lambda find=find: list(islice(find(request, term), MOST_FOUND)))  # type: ignore[misc]
        complete = complete and rows is not None
        for row in rows or ():
            found.setdefault(row.link, row)
    return list(found.values()), complete


def fits_term(term: str, *texts: str) -> bool:
    """Return whether the texts contain each word of the term. Case and spaces in the texts do not matter."""
    whole = "".join(" ".join(texts).casefold().split())
    return all(word in whole for word in term.casefold().split())


def translate_to_all_languages(translate: Callable[[], str]) -> list[str]:
    """Return what `translate` returns in the current language, then in the others."""
    found = [translate()]
    for code, _name in settings.LANGUAGES:
        if code != get_language():
            with override(code):
                found.append(translate())
    return found


# --- pages and actions ------------------------------------------------------------------------------------------------


def find_pages(request: HttpRequest, term: str) -> Iterator[Found]:
    for group, entry, tabs in iterate_open_entries(request.user):
        for tab in tabs:
            if fits_term(term, *translate_to_all_languages(partial(mod, "%s %s", (tab.title, entry.title)))):
                way = entry.title if entry.title != tab.title else group
                yield Found(_("Page"), entry.icon, str(tab.title), tab.link, str(way))


def find_actions(request: HttpRequest, term: str) -> Iterator[Found]:
    """Find forms that add a row."""
    for model, pages in admin.site._registry.items():
        if pages.has_add_permission(request):
            titles = translate_to_all_languages(partial(mod, _("Add: %s"), model._meta.verbose_name))
            if fits_term(term, *titles):
                name = f"admin:{model._meta.app_label}_{model._meta.model_name}_add"
                yield Found(_("Action"), "add", titles[0], reverse(name))


def find_pauses(request: HttpRequest, term: str) -> Iterator[Found]:
    """Find what can be paused or resumed: everything, channels and nodes."""
    paused = set(Pause.objects.values_list("scope", flat=True)[:MOST_READ])
    scopes = ["all"]
    for kind, rows in (("channel", ChannelConfig.objects), ("node", Node.objects)):
        scopes += [f"{kind}:{key}" for key in rows.filter(retired_at=None).values_list("key", flat=True)[:MOST_READ]]
    for scope in scopes:
        ends = scope in paused
        if not request.user.has_perm("scheduling.delete_pause" if ends else "scheduling.add_pause"):
            continue
        titles = translate_to_all_languages(partial(_describe_pause_action, scope, ends))
        if fits_term(term, *titles):
            name, icon = ("end", "play_circle") if ends else ("add", "pause_circle")
            link = f"{reverse(f'admin:scheduling_pause_{name}')}?{urlencode({'scope': scope})}"
            yield Found(_("Action"), icon, titles[0], link)


def _describe_pause_action(scope: str, ends: bool) -> str:
    words = gettext("Resume %(what)s") if ends else gettext("Pause %(what)s")
    return words % {"what": describe_scope(scope)}


# --- configuration ----------------------------------------------------------------------------------------------------


def find_nodes(request: HttpRequest, term: str) -> Iterator[Found]:
    for row in Node.objects.filter(retired_at=None).select_related("stage", "template")[:MOST_READ]:
        if fits_term(term, row.name, row.key, row.trigger, str(row.stage), row.template.key):
            detail = " · ".join([*([row.key] if row.name else []), str(row.stage), row.trigger])
            yield Found(_("Node"), "account_tree", str(row), find_address(row), detail)


def find_templates(request: HttpRequest, term: str) -> Iterator[Found]:
    for row in Template.objects.filter(retired_at=None)[:MOST_READ]:
        if fits_term(term, row.key, row.content_type):
            yield Found(_("Template"), "chat", row.key, find_address(row), row.content_type)


def find_channels(request: HttpRequest, term: str) -> Iterator[Found]:
    columns = ("pk", "key", "name", "kind")
    for pk, key, name, kind in ChannelConfig.objects.filter(retired_at=None).values_list(*columns)[:MOST_READ]:
        if fits_term(term, key, name, kind):
            link = reverse("admin:scheduling_channelconfig_change", args=[pk])
            detail = f"{key} · {kind}" if name else kind
            yield Found(_("Channel"), "outgoing_mail", name or key, link, detail)


def find_communities(request: HttpRequest, term: str) -> Iterator[Found]:
    for row in Community.objects.filter(Q(chat_id__startswith=term) | Q(name__icontains=term))[:MOST_FOUND]:
        yield Found(_("Community"), "groups", str(row), find_address(row), row.chat_id)


# --- records ----------------------------------------------------------------------------------------------------------


def find_customers(request: HttpRequest, term: str) -> Iterator[Found]:
    keys = find_first_customers(term, MOST_FOUND)
    rows = Customer.objects.in_bulk(keys)
    for row in (rows[key] for key in dict.fromkeys(keys) if key in rows):
        yield Found(_("Customer"), "person", str(row), find_address(row), reveal_odd_characters(row.user_id))


def find_touches(request: HttpRequest, term: str) -> Iterator[Found]:
    """Find a touch by its full id."""
    if uuid := parse_uuid(term):
        for row in Touch.objects.filter(pk=uuid).select_related("node", "customer"):
            title = f"{row.node} → {row.customer}"
            yield Found(_("Touch"), "send", title, find_address(row), row.get_state_display())


def find_failed_tasks(request: HttpRequest, term: str) -> Iterator[Found]:
    """Find a failed task by its full id or that of its touch or job."""
    if uuid := parse_uuid(term):
        for row in FailedTask.objects.filter(Q(pk=uuid) | Q(task_id=uuid))[:MOST_FOUND]:
            title = translate_reason(row.reason)
            yield Found(_("Failed task"), "error", title, find_address(row), row.get_state_display())


def find_events_by_id(request: HttpRequest, term: str) -> Iterator[Found]:
    yield from _describe_events(Event.objects.filter(pk__in=find_events_by_term(term)[:MOST_FOUND]))


def find_events_of_order(request: HttpRequest, term: str) -> Iterator[Found]:
    """Find the latest events whose data name an order with this id. Other fields of the data may be secret."""
    needle = json.dumps(term, ensure_ascii=False)[1:-1]
    given = {"term": term, "needle": needle, "searched": SEARCHED_EVENTS, "found": MOST_FOUND}
    found = sql.rows(_EVENTS_OF_ORDER, given)
    yield from _describe_events(Event.objects.filter(pk__in=[row[0] for row in found]))


# The text of the data is compared first: to take all of it apart costs several times as much.
_EVENTS_OF_ORDER = """
SELECT latest.id
FROM (SELECT id, data FROM scheduling_event ORDER BY id DESC LIMIT %(searched)s) AS latest
WHERE strpos(latest.data::text, %(needle)s) > 0 AND jsonb_typeof(latest.data) = 'object' AND EXISTS (
    SELECT FROM jsonb_each_text(latest.data) AS field WHERE field.value = %(term)s AND field.key ~* '(order|trade)'
)
LIMIT %(found)s
"""


def _describe_events(rows: Iterable[Event]) -> Iterator[Found]:
    for row in rows:
        shown = (row.source, reveal_odd_characters(row.user_id), format_instant(row.occurred_at))
        detail = format_html_join(" · ", "{}", ((each,) for each in shown))
        title = f"{row.type} {reveal_odd_characters(row.event_id)}"
        yield Found(_("Event"), "bolt", title, find_address(row), detail)


FINDERS: tuple[Finder, ...] = (
    ("scheduling.view_touch", find_touches),
    ("scheduling.view_failedtask", find_failed_tasks),
    ("scheduling.view_customer", find_customers),
    ("scheduling.view_event", find_events_by_id),
    ("", find_pages),
    ("scheduling.view_node", find_nodes),
    ("scheduling.view_template", find_templates),
    ("scheduling.view_channelconfig", find_channels),
    ("", find_pauses),
    ("", find_actions),
    ("scheduling.view_community", find_communities),
)
#: They read many rows, so they take what is left of the time.
SLOW_FINDERS: tuple[Finder, ...] = (("scheduling.view_event", find_events_of_order),)
