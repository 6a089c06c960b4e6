from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from django.test import Client

from scheduling.models import Community, Template, TemplateText, Touch
from tests.scheduling.admin.conftest import Receiver
from tests.support.matrix import MatrixBuilder
from tests.support.tables import each_row

pytestmark = pytest.mark.django_db

Url = Callable[..., str]


def test_template_body_with_error_is_refused(
    matrix: MatrixBuilder, editor: Client, admin_url: Url, fill_form: Callable[..., dict[str, Any]]
) -> None:
    template = matrix.template("guide")
    url = admin_url("template_change", template.pk)
    for body, complaint in (
        ("hi {{ user.nickname }}", "unknown variable “user.nickname”"),
        ("hi\n{{ user.name", "line 2"),
        ("{{ wallet }}", "unknown variable “wallet”"),
        (
            "{{ user.name|default('x') }}",
            "line 1: “user.name|default(&#x27;x&#x27;)” cannot be read",
        ),
        ("{{ " + "9" * 5_000 + " }}", "line 1: a tag must not be longer than 500 characters"),
        ("{% if 1 %}" * 200 + "{% endif %}" * 200, "it is nested too deeply"),
        ("{% if 1 %}" * 300 + "{% endif %}" * 300, "a text must not have more than 500 tags"),
        ("x" * 70_000, "must not be longer than 32768 characters"),
    ):
        answer = editor.post(url, fill_form(url, **{"texts-0-body": body}))
        errors = answer.context["inline_admin_formsets"][0].formset.errors[0]
        assert list(errors) == ["body"]
        assert complaint in str(errors)


def test_changed_text_is_a_new_template_version(
    matrix: MatrixBuilder, editor: Client, admin_url: Url, fill_form: Callable[..., dict[str, Any]]
) -> None:
    template = matrix.template("guide")
    url = admin_url("template_change", template.pk)
    assert editor.post(url, fill_form(url, **{"texts-0-body": "dear {{ user.name }}"})).status_code == 302
    template.refresh_from_db()
    assert template.version == 2
    assert TemplateText.objects.get(template=template).body == "dear {{ user.name }}"


def test_template_is_created_with_its_first_text(editor: Client, admin_url: Url) -> None:
    data = {
        "key": "new", "content_type": "guide", "category": "service", "texts-TOTAL_FORMS": "1",
        "texts-INITIAL_FORMS": "0", "texts-0-locale": "zh-hans", "texts-0-body": "您好 {{ user.name }}",
    }  # fmt: skip
    assert editor.post(admin_url("template_add"), data).status_code == 302
    assert Template.objects.get(key="new").texts.get().body == "您好 {{ user.name }}"


def test_template_preview_renders_for_a_customer(matrix: MatrixBuilder, editor: Client, admin_url: Url) -> None:
    from scheduling.operations.commands import update_customer

    update_customer("ann", {"name": "Ann Lee"})
    url = admin_url("template_preview")
    body = "hi {{ user.name }}, order {{ event.data.order_no }}"
    said = editor.post(url, {"body": body, "user_id": "ann", "data": '{"order_no": "A1"}'}).json()
    assert said["body"] == "hi Ann Lee, order A1"
    assert "order_no" in editor.post(url, {"body": body, "user_id": "ann"}).json()["problem"]
    assert "not JSON" in editor.post(url, {"body": body, "data": "{"}).json()["problem"]


def test_viewer_previews_stored_texts_only(matrix: MatrixBuilder, viewer: Client, admin_url: Url) -> None:
    template = matrix.template("guide", body="hi {{ user.name }}, order {{ event.data.order_no }}")
    text = template.texts.get()
    page = viewer.get(admin_url("template_change", template.pk)).content.decode()
    assert f'data-text="{text.pk}"' in page
    url = admin_url("template_preview")
    asked = {"text": text.pk, "body": "bye {{ user.name }}", "user_id": "ann", "data": '{"order_no": "A1"}'}
    assert viewer.post(url, asked).json()["body"] == "hi ann, order A1"
    for unknown in ("0", "x", "9" * 30):
        assert viewer.post(url, {"text": unknown}).status_code == 404


@each_row("group", ["viewer", "operator"])
def test_preview_of_own_text_needs_edit_permission(
    matrix: MatrixBuilder, as_member: Callable[[str], Client], admin_url: Url, group: str
) -> None:
    client, url = as_member(group), admin_url("template_preview")
    for asked in ({"body": "bye {{ user.name }}"}, {"subject": "bye"}, {}):
        answer = client.post(url, asked)
        assert answer.status_code == 403
        assert b"bye" not in answer.content
    assert client.get(url, {"body": "bye"}).status_code == 403


def test_template_test_is_marked_and_makes_no_touch(matrix: MatrixBuilder, editor: Client, admin_url: Url) -> None:
    template = matrix.template("guide")
    url = admin_url("template_send_test", template.pk)
    page = editor.post(url, {"channel": matrix.channel.pk, "user_id": "ann"})
    assert page.context["result"]["title"] == "Delivered"
    assert page.context["body"] == "[Test] hi ann"
    assert Touch.objects.count() == 0


def test_template_test_without_target_is_not_sent(matrix: MatrixBuilder, editor: Client, admin_url: Url) -> None:
    from scheduling.models import ChannelConfig

    robot = ChannelConfig.objects.create(key="robot", kind="wecom")
    community = Community.objects.create(chat_id="c1")
    template = matrix.template("guide")
    page = editor.post(
        admin_url("template_send_test", template.pk), {"channel": robot.pk, "community": community.chat_id}
    )
    assert page.context["result"]["title"] == "Not sent"
    assert "No target to send to" in page.context["result"]["text"]


def test_template_test_reaches_a_webhook(
    matrix: MatrixBuilder, editor: Client, admin_url: Url, receiver: Receiver
) -> None:
    from scheduling.models import ChannelConfig

    hook = ChannelConfig.objects.create(key="hook", kind="webhook", config={"url": receiver.url})
    page = editor.post(admin_url("template_send_test", matrix.template("guide").pk), {"channel": hook.pk})
    assert page.context["result"]["title"] == "Delivered"
    assert [each["data"]["node"] for each in receiver.bodies] == ["test"]


def test_used_template_is_not_deleted_or_retired(matrix: MatrixBuilder, editor: Client, admin_url: Url) -> None:
    template = matrix.node().template
    assert editor.post(admin_url("template_delete", template.pk), {"post": "yes"}).status_code == 403
    assert "guide" in editor.get(admin_url("template_retire", template.pk)).context["problem"]
    editor.post(admin_url("template_retire", template.pk))
    template.refresh_from_db()
    assert template.retired_at is None


@each_row("language, shown", [("zh-hans", "您好"), ("en", "Dear"), ("fr", "您好")])
def test_template_list_shows_the_text_of_the_readers_language(
    matrix: MatrixBuilder, editor: Client, admin_url: Url, language: str, shown: str
) -> None:
    template = matrix.template("guide", body="您好，{{ user.name }}")
    TemplateText.objects.filter(template=template).update(locale="zh-hans")
    TemplateText.objects.create(template=template, locale="en", body="Dear {{ user.name }}")
    editor.cookies["django_language"] = language
    page = editor.get(admin_url("template_changelist"), headers={"accept-language": "zh-hans"}).content.decode()
    assert [each for each in ("您好", "Dear") if each in page] == [shown]
