"""No page mixes two languages. Each shows its times with the offset, odd characters of ids, and links that lead on."""

from __future__ import annotations

import html
import re
from dataclasses import dataclass
from datetime import timedelta
from urllib.parse import parse_qsl, urlencode

import pytest
from django.contrib import admin
from django.contrib.admin.models import CHANGE, LogEntry
from django.contrib.auth.models import User
from django.db import IntegrityError, connection, transaction
from django.db.models import DateTimeField
from django.template.response import TemplateResponse
from django.test import Client, RequestFactory
from django.urls import reverse
from django.utils.timezone import now
from django.utils.translation import override
from django.views.defaults import server_error

from rpa_tasks.models import Job, Shop
from scheduling.admin.navigation import list_menu_groups
from scheduling.admin.shown_values import describe_instant
from scheduling.configuration import snapshot
from scheduling.management.commands.bootstrap import Command
from scheduling.models import Customer, FailedTask, Touch
from sessions.detection.silence_events import SOURCE
from sessions.frames import Frame
from sessions.models import Campaign
from sessions.store import sessions
from tests.language.catalogue import CATALOGUES, entries
from tests.language.page_texts import Text, Texts, read_words, words
from tests.security import admin_pages
from tests.security.admin_pages import MODELS, page_addresses
from tests.security.test_lookups import accepts, address

pytestmark = [pytest.mark.django_db(transaction=True), pytest.mark.usefixtures("static_root")]

HAN = re.compile(r"[\u4e00-\u9fff]")
#: Names in any language, keys, and the text of a message.
NAMES = {
    "JSON Schema", "command editor", "format: markdown", "Webhook", "Aftertouch", "简体中文", "English", "GitHub",
    "cap (user)", "presale, log,", "hi ann",
}  # fmt: skip
#: The audit log shows titles and reasons in the language of the user who acted.
STORED_WORDS = "/admin/scheduling/auditentry/"
ODD = "ann\u200b\u202e"
#: What is typed, chosen, run or stored, in its own form.
RAW = {"script", "style", "textarea", "option", "pre", "at-bubble", "button"}
#: A time of a day, also after its date. A time that names its offset is complete.
TIME = re.compile(
    r"(?<![\dT:.+-])((\d{4}-)?\d\d-\d\d \d\d:\d\d|\d\d:\d\d:\d\d)(:\d\d)?(?![\d:]|(\.\d+)? ?[+-]\d\d:\d\d)"
)
INSTANT = re.compile(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d [+-]\d\d:\d\d")


def member(language, *, staff=True):
    client = Client(headers={"accept-language": language})
    client.cookies["django_language"] = language
    if staff:
        client.force_login(User.objects.create_superuser("u0", password="x"))
    return client


# --- in Chinese ---------------------------------------------------------------------------------------------------


@pytest.fixture
def unreadable_rows(matrix, record_event):
    """A row of everything. No secret is readable."""
    Command().grant_permissions()
    admin_pages.build(matrix, record_event)
    FailedTask.objects.create(origin="message", failure="unreadable", reason="not_json", fingerprint="f1")
    FailedTask.objects.update(detail="42")
    with connection.cursor() as cursor:
        for table, column in (("channelconfig", "config"), ("community", "targets"), ("webhooksubscription", "config")):
            cursor.execute(f"UPDATE scheduling_{table} SET {column} = 'gibberish'")
    snapshot._snapshot = None


def english_in(said):
    """Two words in a row that are nothing but letters: no key, no name of a file, no address."""
    for part in re.split(r"[^\x21-\x7e ]+", said):
        row = []
        for token in [*part.split(" "), ""]:
            if re.fullmatch(r"[(“\"']?[A-Za-z][a-z'’]+[)”\"',.:;!?]*", token):
                row.append(token)
                continue
            if len(row) > 1 and " ".join(row) not in NAMES:
                return " ".join(row)
            row = []
    return ""


def untranslated():
    """Return single words of the catalogues that a Chinese page must translate."""
    found = {entry.said["msgid"] for path in CATALOGUES for entry in entries(path) if entry.said["msgid"].isalpha()}
    return {word for word in found if word.istitle() and len(word) > 3} - NAMES


@pytest.mark.usefixtures("unreadable_rows")
def test_chinese_pages_open_with_unreadable_secrets_and_show_no_english(hide_menu):
    client = member("zh-hans")
    user = User.objects.get(username="u0")
    pages = read_pages(client, [reverse("admin:index")])
    hide_menu()
    deletion = reverse("admin:auth_group_delete", args=MODELS["auth_group"].spare(user))
    pages |= read_pages(client, [deletion, *page_addresses(user)])
    assert len(pages) > 150
    known = untranslated()
    said = {
        (each, page) for page in pages if not page.startswith(STORED_WORDS) for each in read_words(pages[page].texts)
    }
    foreign = sorted((text, page) for text, page in said if english_in(text) or text.rstrip(":") in known)
    assert foreign == [], "\n".join(f"{text}   {page}" for text, page in foreign)


# --- in English ---------------------------------------------------------------------------------------------------


@pytest.fixture
def odd_rows(matrix, record_event):
    """A row of everything, with odd ids."""
    admin_pages.build(matrix, lambda *args, **named: record_event(*args, **{"user": ODD, **named}))
    Shop.objects.filter(shop_id="s1").update(shop_id=ODD, name="")
    Job.objects.exclude(dedupe_key="").update(dedupe_key=ODD)
    for task in FailedTask.objects.all():
        ids = {name: ODD for name in ("user_id", "shop_id") if name in task.payload}
        FailedTask.objects.filter(pk=task.pk).update(payload={**task.payload, **ids})
    sessions.live_store().note_activity([Frame(ODD, "ann", sender="user", kind="message")])
    record_event("session.silent", ODD, source=SOURCE, event_id=f"{ODD}:{int(now().timestamp() * 1_000_000)}")


def pages_of_odd_rows():
    """Pages of the rows with odd ids that `page_addresses` does not read, and searches for them."""
    shop, job = Shop.objects.get(shop_id=ODD), Job.objects.filter(shop__shop_id=ODD)[0]
    rows = {"scheduling_failedtask": FailedTask.objects.filter(origin="rpa_job")[0], "rpa_tasks_shop": shop}
    rows |= {"rpa_tasks_job": job, "scheduling_touch": Touch.objects.filter(state="scheduled")[0]}
    pages = [reverse(f"admin:{name}_change", args=[row.pk]) for name, row in rows.items()]
    pages += [f"{reverse('admin:search')}?{urlencode({'s': term})}" for term in (ODD, "order.paid")]
    pages += [reverse(f"admin:rpa_tasks_shop_{name}", args=[shop.pk]) for name in ("take_over", "run_now")]
    chat = f"{reverse('admin:chat_sessions_silencepolicy_chat')}?{urlencode({'session': ODD})}"
    return [*pages, reverse("admin:chat_sessions_silencepolicy_chats"), chat]


def histories(user):
    """Of an odd customer, with an entry of Django's own log, and of a row that was changed."""
    customer, campaign = Customer.objects.get(user_id=ODD), Campaign.objects.get(key="sale")
    LogEntry.objects.log_actions(user.pk, [customer], CHANGE, "Enabled again.", single_object=True)
    campaign.ends_at += timedelta(days=1)
    campaign.save()
    return [
        reverse("admin:scheduling_customer_history", args=[customer.pk]),
        reverse("admin:chat_sessions_campaign_history", args=[campaign.pk]),
    ]


@dataclass(frozen=True, slots=True)
class Shown:
    html: str
    texts: list[Text]


def read_pages(client, addresses):
    """The pages by their address; for one that leads to another, by that."""
    pages = {}
    for page in addresses:
        answer = client.get(page, follow=True)
        assert answer.status_code == 200, page
        drawn = answer.content.decode()
        pages[answer.redirect_chain[-1][0] if answer.redirect_chain else page] = Shown(drawn, Texts(drawn).found)
    return pages


@pytest.mark.usefixtures("odd_rows")
def test_english_pages_are_in_one_language_with_complete_times_visible_ids_and_links_that_lead_on(hide_menu):
    client = member("en")
    user = User.objects.get(username="u0")
    of_customer, of_campaign = histories(user)
    pages = read_pages(client, [reverse("admin:index")])
    hide_menu()
    pages = read_pages(client, [*page_addresses(user), of_customer, of_campaign, *pages_of_odd_rows()]) | pages
    assert len(pages) > 150
    assert list_chinese(pages) == []
    assert list_wrong_headings(client, pages) == []
    check_times_and_ids(pages)
    assert "?p=2" not in pages[of_customer].html  # as after a list whose rows are not counted
    assert pages[of_campaign].html.count(describe_instant(Campaign.objects.get(key="sale").ends_at)) == 1
    links = list(list_filter_links(pages))
    assert len(links) > 40
    assert [link for link in sorted(links) if not accepts(user, link)] == []
    changes = [reverse(f"admin:{name}_change", args=rights.row(user)) for name, rights in MODELS.items()]
    fill_times()
    check_times_and_ids(read_pages(client, changes))


def list_chinese(pages):
    said = {
        (each, page) for page in pages if not page.startswith(STORED_WORDS) for each in read_words(pages[page].texts)
    }
    return sorted((text, page) for text, page in said if HAN.search(text) and text not in NAMES)


def list_wrong_headings(client, pages):
    """Each tab of the menu names the heading and the title of its page."""
    tabs = [tab for _title, entries in list_menu_groups() for entry in entries for tab in entry.tabs]
    opened = read_pages(client, [tab.link for tab in tabs if tab.link not in pages]) | pages
    own = [tab for tab in tabs if tab.link in opened]  # the list of one row leads to the row
    assert len(own) > len(tabs) - 4
    wrong = []
    for tab in own:
        page = opened[tab.link].html
        with override("en"):
            name = str(tab.title)
        heading = [plain(each) for each in re.findall(r"<h1[^>]*>(.*?)</h1>", page, re.DOTALL)]
        title = plain(page.partition("<title>")[2].partition("</title>")[0])
        if heading != [name] or title != f"{name} | Aftertouch" or page.count("<main") != 1:
            wrong.append((tab.name, heading, title))
    return wrong


def plain(markup):
    return " ".join(html.unescape(re.sub(r"<[^>]+>", " ", markup)).split())


def check_times_and_ids(pages):
    shown = {
        (each.text.strip(), each.instant, page)
        for page, found in pages.items()
        for each in found.texts
        if not each.within & RAW
    }
    times = {each for each in shown if TIME.search(each[0])}
    assert len(times) > 20
    assert [each for each in sorted(times) if not INSTANT.fullmatch(each[1])] == []
    assert [each for each in sorted(shown) if "<time" in each[0]] == [], "escaped markup"
    assert [each for each in sorted(shown) if {"\u200b", "\u202e"} & set(each[0])] == []
    assert any("ann⟨U+200B⟩⟨U+202E⟩" in text for text, _instant, _page in shown)


def fill_times():
    """Set each empty time of each row to now, as far as the table allows it."""
    for model in admin.site._registry:
        for field in model._meta.fields:
            if isinstance(field, DateTimeField) and field.null:
                try:
                    with transaction.atomic():
                        model._default_manager.filter(**{field.name: None}).update(**{field.name: now()})
                except IntegrityError:
                    continue


def list_filter_links(pages):
    """Each link with a filter, and each choice of each filter. Of orders and pages one stands for all."""
    lists = {address(model) for model in admin.site._registry}
    links = {}
    for page, shown in pages.items():
        for found in re.findall(r'href="([^"]*\?[^"]+)"', shown.html):
            path, _, query = html.unescape(found).partition("?")
            path = path or page.partition("?")[0]
            if path in lists:
                chosen = frozenset((name, "" if name in "op" else value) for name, value in parse_qsl(query, True))
                links[path, chosen] = f"{path}?{query}"
    return links.values()


# --- before the login ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("language", ["zh-hans", "en"])
def test_login_and_error_pages_use_one_language(language):
    stranger = member(language, staff=False)
    User.objects.create_user("u9", password="x", is_staff=True)
    nobody = member(language, staff=False)
    nobody.login(username="u9", password="x")
    strict = Client(enforce_csrf_checks=True, headers={"accept-language": language})
    strict.cookies["django_language"] = language
    with override(language):
        broken = server_error(RequestFactory().get("/"))
    answers = {
        "login": stranger.get(reverse("admin:login")),
        "refused": stranger.post(reverse("admin:login"), {"username": "u9", "password": "y"}),
        "403": nobody.get(reverse("admin:scheduling_node_changelist")),
        "403 csrf": strict.post(reverse("admin:login"), {}),
        "404": stranger.get("/nowhere"),
        "500": broken,
    }
    for name, answer in answers.items():
        assert answer.status_code == int(name[:3]) if name[0].isdigit() else 200, name
        if isinstance(answer, TemplateResponse):
            answer.render()
        texts = words(answer.content.decode())
        assert len(texts) > 3, name
        foreign = HAN.search if language == "en" else english_in
        assert [text for text in texts if text not in NAMES and foreign(text)] == [], name
