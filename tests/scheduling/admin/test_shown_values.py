"""Instants and stored ids on every page of the back office: each time has its offset, each odd character is visible."""

from __future__ import annotations

import re
from datetime import UTC, datetime, timedelta
from html.parser import HTMLParser
from urllib.parse import urlencode

import pytest
from django.contrib import admin
from django.contrib.admin.models import CHANGE, LogEntry
from django.contrib.auth.models import User
from django.db import IntegrityError, transaction
from django.db.models import DateTimeField
from django.test import Client
from django.urls import reverse
from django.utils.timezone import now
from pytest_django import Settings

from rpa_tasks.models import Job, Shop
from scheduling.admin.shown_values import describe_instant, format_instant, insert_values
from scheduling.models import Customer, FailedTask, Touch
from sessions.detection.silence_events import SOURCE
from sessions.frames import Frame
from sessions.models import Campaign
from sessions.store import sessions
from tests.security import admin_pages
from tests.security.admin_pages import MODELS, page_addresses
from tests.support.matrix import MatrixBuilder, RecordEvent
from tests.support.tables import each_row

pytestmark = pytest.mark.django_db(transaction=True)

ODD = "ann\u200b\u202e"
VOID = {"br", "img", "input", "meta", "link", "hr", "source", "wbr", "col", "area", "base", "embed", "track", "param"}
#: What is typed, chosen, run or stored, in its own form.
RAW = {"script", "style", "textarea", "option", "pre", "at-bubble"}
#: A time of a day, also after its date. A time that names its offset is complete.
TIME = re.compile(
    r"(?<![\dT:.+-])((\d{4}-)?\d\d-\d\d \d\d:\d\d|\d\d:\d\d:\d\d)(:\d\d)?(?![\d:]|(\.\d+)? ?[+-]\d\d:\d\d)"
)
TITLE = re.compile(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d [+-]\d\d:\d\d")
#: Attributes that are read out, or shown on hovering.
SPOKEN = {"title", "placeholder", "aria-label", "alt", "data-label"}


class ShownTexts(HTMLParser):
    """The texts and spoken attributes of a page, each with the title of the `<time>` around it."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.texts: list[tuple[str, str]] = []
        self._open: list[tuple[str, str, str]] = []
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        known = {name: value or "" for name, value in attrs}
        self.texts += [(value, "") for name, value in known.items() if name in SPOKEN]
        if tag not in VOID:
            whole = tag == "time" and datetime.fromisoformat(known["datetime"]).tzinfo
            raw = next((name for name in (tag, *known.get("class", "").split()) if name in RAW), "")
            self._open.append((tag, known.get("title", "") if whole else "", raw))

    def handle_endtag(self, tag: str) -> None:
        while self._open and self._open.pop()[0] != tag:
            pass

    def handle_data(self, data: str) -> None:
        if not any(raw for _tag, _title, raw in self._open):
            self.texts.append((data, next((title for _tag, title, _raw in reversed(self._open) if title), "")))


@pytest.fixture
def root(matrix: MatrixBuilder, record_event: RecordEvent, static_root: None) -> Client:
    """A row of everything, with odd ids."""
    user = User.objects.create_superuser("root", password="x")
    admin_pages.build(matrix, lambda *args, **named: record_event(*args, **{"user": ODD, **named}))
    Shop.objects.filter(shop_id="s1").update(shop_id=ODD, name="")
    Job.objects.exclude(dedupe_key="").update(dedupe_key=ODD)
    for task in FailedTask.objects.all():
        ids = {name: ODD for name in ("user_id", "shop_id") if name in task.payload}
        FailedTask.objects.filter(pk=task.pk).update(payload={**task.payload, **ids})
    sessions.live_store().note_activity([Frame(ODD, "ann", sender="user", kind="message")])
    record_event("session.silent", ODD, source=SOURCE, event_id=f"{ODD}:{int(now().timestamp() * 1_000_000)}")
    client = Client(headers={"accept-language": "en"})
    client.force_login(user, backend="django.contrib.auth.backends.ModelBackend")
    return client


def more_addresses() -> list[str]:
    """Pages of the rows with odd ids that `page_addresses` does not read, and searches for them."""
    shop, job = Shop.objects.get(shop_id=ODD), Job.objects.filter(shop__shop_id=ODD)[0]
    rows = {"scheduling_failedtask": FailedTask.objects.filter(origin="rpa_job")[0], "rpa_tasks_shop": shop}
    rows |= {"rpa_tasks_job": job, "scheduling_touch": Touch.objects.filter(state="scheduled")[0]}
    pages = [reverse(f"admin:{name}_change", args=[row.pk]) for name, row in rows.items()]
    pages += [f"{reverse('admin:search')}?{urlencode({'s': term})}" for term in (ODD, "order.paid")]
    pages += [reverse(f"admin:rpa_tasks_shop_{name}", args=[shop.pk]) for name in ("take_over", "run_now")]
    chat = f"{reverse('admin:chat_sessions_chat')}?{urlencode({'session': ODD})}"
    return [*pages, reverse("admin:chat_sessions_chats"), chat]


def fill_times() -> None:
    """Set each empty time of each row to now, as far as the table allows it."""
    for model in admin.site._registry:
        for field in model._meta.fields:
            if isinstance(field, DateTimeField) and field.null:
                try:
                    with transaction.atomic():
                        model._default_manager.filter(**{field.name: None}).update(**{field.name: now()})
                except IntegrityError:
                    continue


def read_pages(client: Client, addresses: list[str]) -> dict[str, list[tuple[str, str]]]:
    pages = {}
    for address in addresses:
        answer = client.get(address, follow=True)
        assert answer.status_code == 200, address
        pages[address] = ShownTexts(answer.content.decode()).texts
    return pages


def check(pages: dict[str, list[tuple[str, str]]]) -> None:
    assert len(pages) > 40
    shown = {(text.strip(), title, address) for address, texts in pages.items() for text, title in texts}
    times = {each for each in shown if TIME.search(each[0])}
    assert len(times) > 20
    assert [each for each in sorted(times) if not TITLE.fullmatch(each[1])] == []
    assert [each for each in sorted(shown) if "<time" in each[0]] == [], "escaped markup"
    assert [each for each in sorted(shown) if {"\u200b", "\u202e"} & set(each[0])] == []
    assert any("ann⟨U+200B⟩⟨U+202E⟩" in text for text, _title, _address in shown)


def test_pages_show_times_with_offset_and_odd_characters_of_ids(root: Client) -> None:
    user = User.objects.get(username="root")
    customer = Customer.objects.get(user_id=ODD)
    LogEntry.objects.log_actions(user.pk, [customer], CHANGE, "Enabled again.", single_object=True)
    histories = [reverse("admin:scheduling_customer_history", args=[customer.pk])]
    assert "?p=2" not in root.get(histories[0]).content.decode()  # as after a list whose rows are not counted
    campaign = Campaign.objects.get(key="sale")
    campaign.ends_at += timedelta(days=1)
    campaign.save()
    histories.append(reverse("admin:chat_sessions_campaign_history", args=[campaign.pk]))
    assert root.get(histories[1]).content.decode().count(describe_instant(campaign.ends_at)) == 1
    check(read_pages(root, [*page_addresses(user, forms=False), *histories, *more_addresses()]))
    changes = [reverse(f"admin:{name}_change", args=rights.row(user)) for name, rights in MODELS.items()]
    fill_times()
    check(read_pages(root, changes))


@each_row("zone", ["Asia/Shanghai", "America/New_York"])
def test_instant_has_the_offset_of_the_installation(zone: str, settings: Settings) -> None:
    settings.TIME_ZONE = zone
    summer, winter = datetime(2026, 7, 1, tzinfo=UTC), datetime(2026, 12, 1, tzinfo=UTC)
    assert [describe_instant(at) for at in (summer, winter)] == {
        "Asia/Shanghai": ["2026-07-01 08:00:00 +08:00", "2026-12-01 08:00:00 +08:00"],
        "America/New_York": ["2026-06-30 20:00:00 -04:00", "2026-11-30 19:00:00 -05:00"],
    }[zone]
    assert datetime.fromisoformat(re.findall(r'datetime="(.+?)"', format_instant(summer))[0]) == summer


def test_inserted_values_keep_their_markup_and_texts_are_escaped() -> None:
    shown = insert_values("a < %(name)s at %(time)s", name="<b>", time=format_instant(datetime(2026, 7, 1, tzinfo=UTC)))
    assert shown.startswith('a &lt; &lt;b&gt; at <time datetime="2026-07-01T08:00:00+08:00" title="2026-07-01 08:00:00')
    assert format_instant(None) == "–"
