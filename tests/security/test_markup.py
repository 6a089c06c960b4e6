"""What strangers write stays text: no page lets their markup in, and none puts their words where scripts are read."""

from datetime import timedelta
from html.parser import HTMLParser

import pytest
from django.contrib import admin
from django.contrib.auth.models import User
from django.test import Client
from django.urls import reverse
from django.utils.timezone import now

from rpa_tasks.jobs.publish import PublishRequest, publish_job
from rpa_tasks.models import Flow, Platform, Shop
from scheduling.models import Community, Customer, EventType, FailedTask, Pause, Touch
from tests.scheduling.core.conftest import deliver

pytestmark = [pytest.mark.django_db(transaction=True), pytest.mark.usefixtures("static_root")]

MARK = "zq7"
EVIL = f"""{MARK}'"`);</script></textarea><img src=x onerror=alert(1)>{{{{7*7}}}}"""
READ_AS_CODE = ("on", "x-", "@", ":", "hx-on", "hx-vals", "data-hx-on")


class Reader(HTMLParser):
    """Record where the marker is in a page."""

    def __init__(self):
        super().__init__()
        self.found = []
        self.script = False

    def handle_starttag(self, tag, attrs):
        self.script = tag in ("script", "style") and dict(attrs).get("type") != "application/json"
        for name, value in attrs:
            if tag == "img" and (name, value) == ("src", "x"):
                self.found.append("a tag of theirs")
            if MARK in (value or "") and (name.startswith(READ_AS_CODE) or (value or "").startswith("javascript:")):
                self.found.append(f"{tag} {name}={value}")

    def handle_endtag(self, tag):
        self.script = False

    def handle_data(self, data):
        if self.script and MARK in data:
            self.found.append(f"script: {data[:200]}")


@pytest.fixture
def foreign_rows(matrix, record_event):
    """Return a row for every text from outside or typed by ops, each with the marker."""
    matrix.stage.name = EVIL[:80]
    matrix.stage.save()
    EventType.objects.create(key="material.downloaded", name=EVIL[:80])
    matrix.node("guide", template=matrix.template("guide", body="hi {{ user.name }}"))
    matrix.node("broken", trigger="order.paid", template=matrix.template("broken", body="{{ event.data.order_no }}"))
    Customer.objects.create(user_id=EVIL, name=EVIL, level=EVIL[:40], addresses={"email": EVIL, EVIL: EVIL})
    Community.objects.create(chat_id=EVIL, name=EVIL, targets={})
    long_ago = now() - timedelta(hours=1)
    for kind in ("material.downloaded", "order.paid"):
        told = record_event(
            kind, EVIL, source=EVIL, chat_id=EVIL, data={EVIL: EVIL, "nested": [EVIL]}, occurred_at=long_ago
        )
        deliver(told.task_ids)
    FailedTask.objects.update(detail=EVIL, action_reason=EVIL)
    Pause.objects.create(scope="node:guide", reason=EVIL)
    pdd = Platform.objects.create(key="pdd", name=EVIL)
    Flow.objects.create(platform=pdd, task_type="sync_order", command=["true", "{param}", EVIL])
    Shop.objects.create(platform=pdd, shop_id="s1", name=EVIL)
    publish_job(PublishRequest("pdd", "s1", "sync_order", payload={EVIL: EVIL}))
    User.objects.create_user(f"{MARK}@'+-.", first_name=EVIL[:100])


def pages():
    for name in ("index", "scheduling_node_matrix", "scheduling_failedtask_groups", "scheduling_event_preview"):
        yield reverse(f"admin:{name}")
    yield f"{reverse('admin:scheduling_event_preview')}?type={MARK}"
    for name in ("customer", "failedtask"):  # the two kinds of search
        yield f"{reverse(f'admin:scheduling_{name}_changelist')}?q=%22%27%3E%3Cimg%20src%3Dx%3E{MARK}"
    for model in admin.site._registry:
        if row := model._default_manager.first():
            name = f"admin:{model._meta.app_label}_{model._meta.model_name}_"
            yield reverse(f"{name}changelist")
            yield reverse(f"{name}change", args=[row.pk])


@pytest.mark.usefixtures("foreign_rows")
def test_pages_escape_foreign_text(hide_menu):
    hide_menu()  # it has words of the product only
    client = Client()
    client.force_login(User.objects.create_superuser("root"))
    assert Touch.objects.count() == 2
    refused = Client().post(reverse("admin:login"), {"username": EVIL, "password": EVIL})
    assert MARK in refused.content.decode()
    told = 0
    for page, answer in [("login", refused), *((page, client.get(page)) for page in pages())]:
        if answer.status_code != 200:
            continue
        text = answer.content.decode()
        reader = Reader()
        reader.feed(text)
        assert reader.found == [], page
        assert "<img src=x" not in text, page
        told += MARK in text
    assert told > 20, "the words are shown, so the pages were tested"
