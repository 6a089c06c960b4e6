from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
from django.test import Client

from scheduling.models import Event, TemplateText
from scheduling.operations.commands import update_customer
from tests.scheduling.admin.conftest import Url
from tests.scheduling.core.conftest import deliver
from tests.support.matrix import MatrixBuilder
from tests.support.undrawn import read_context

pytestmark = pytest.mark.django_db(transaction=True)


def test_preview_shows_what_would_be_sent(
    matrix: MatrixBuilder, viewer: Client, admin_url: Url, record_event: Callable[..., Any]
) -> None:
    matrix.node(delay=timedelta(minutes=15))
    matrix.node("again", template=matrix.template("again", content_type="used"))
    matrix.node("off", enabled=False)
    matrix.node("data", template=matrix.template("data", body="{{ event.data.order_no }}"))
    used = matrix.node("used", trigger="order.paid", template=matrix.template("used"))
    deliver(record_event("order.paid").task_ids)
    before = Event.objects.count()
    page = read_context(viewer, admin_url("event_preview"), {"type": "material.downloaded", "user_id": "ann"})
    by_node = {each["node"]: each for each in page["outcomes"]}
    assert (by_node["guide"]["title"], by_node["guide"]["body"]) == ("Would be sent", "hi ann")
    assert by_node["again"]["title"] == "Would not be sent"
    assert dict(by_node["again"]["facts"])["rule"] == "Same content sent recently (v1)"
    assert by_node["data"]["title"] == "Would fail"
    assert "order_no" in by_node["data"]["problem"]
    assert [node.key for node in page["switched_off"]] == ["off"]
    assert Event.objects.count() == before
    assert used.touches.count() == 1


def test_preview_of_an_imagined_customer_judges_its_values(
    matrix: MatrixBuilder, viewer: Client, admin_url: Url
) -> None:
    matrix.node(when={"all": [{"field": "customer.tags", "op": "contains", "value": "new"}]})
    asked = {"type": "material.downloaded", "user_id": "unknown"}
    titles = []
    for given in ({}, {"tags": "b2b，new", "attributes": '{"city": "上海"}'}):
        page = read_context(viewer, admin_url("event_preview"), asked | given)
        titles += [each["title"] for each in page["outcomes"]]
    assert titles == ["No touch is planned", "Would be sent"]


def test_preview_without_a_node_or_with_a_wrong_field_plans_nothing(
    matrix: MatrixBuilder, viewer: Client, admin_url: Url
) -> None:
    asked = {"type": "order.paid", "user_id": "ann"}
    page = viewer.get(admin_url("event_preview"), asked)
    assert (page.context["outcomes"], "no enabled node" in page.content.decode()) == ([], True)
    for field, value in (("attributes", '{"1": 2}'), ("event_data", "{")):
        context = read_context(viewer, admin_url("event_preview"), asked | {field: value})
        assert (list(context["form"].errors), context["outcomes"]) == ([field], None)


def test_preview_renders_stored_templates_only(matrix: MatrixBuilder, viewer: Client, admin_url: Url) -> None:
    matrix.node()
    asked = {"type": "material.downloaded", "user_id": "ann", "body": "bye {{ user.name }}", "subject": "bye",
             "template": "bye"}  # fmt: skip
    outcomes = read_context(viewer, admin_url("event_preview"), asked)["outcomes"]
    assert [each["body"] for each in outcomes] == ["hi ann"]
    assert "bye" not in str(outcomes)
    inside = {"type": "material.downloaded", "user_id": "{{ event.type }}"}
    (outcome,) = read_context(viewer, admin_url("event_preview"), inside)["outcomes"]
    assert outcome["body"] == "hi {{ event.type }}"


def test_preview_names_the_language_of_the_text(matrix: MatrixBuilder, viewer: Client, admin_url: Url) -> None:
    template = matrix.template("guide")
    TemplateText.objects.filter(template=template).update(locale="zh_CN")
    TemplateText.objects.create(template=template, locale="en", body="Hello")
    matrix.node(template=template)
    shown = {}
    for locale in ("", "zh-hans", "zh-TW", "en_US"):
        update_customer("ann", {"locale": locale})
        asked = {"type": "material.downloaded", "user_id": "ann"}
        (outcome,) = read_context(viewer, admin_url("event_preview"), asked)["outcomes"]
        shown[locale] = outcome["language"]
    assert shown == {
        "": "Language: zh_CN", "zh-hans": "Language: zh_CN (the customer has zh-hans)",
        "zh-TW": "Language: zh_CN (the customer has zh-TW)", "en_US": "Language: en (the customer has en_US)",
    }  # fmt: skip


def test_preview_names_followers_and_follows_only_their_node(
    matrix: MatrixBuilder, viewer: Client, admin_url: Url
) -> None:
    matrix.node("guide")
    matrix.node("reminder", "touch.delivered", from_nodes=["guide"])
    page = viewer.get(admin_url("event_preview"), {"type": "material.downloaded", "user_id": "ann"})
    assert [each["followers"] for each in page.context["outcomes"]] == [["reminder (touch.delivered)"]]
    assert "reminder (touch.delivered)" in page.content.decode()
    for node, expected in (("guide", ["reminder"]), ("other", [])):
        asked = {"type": "touch.delivered", "user_id": "ann", "event_data": f'{{"node": "{node}"}}'}
        page = viewer.get(admin_url("event_preview"), asked)
        assert [each["node"] for each in page.context["outcomes"]] == expected
