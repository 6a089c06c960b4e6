from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from django.core.exceptions import ValidationError
from django.test import Client

from scheduling.channels.base import Delivered, Message
from scheduling.models import ChannelConfig, Community, Template, TemplateText, Touch
from scheduling.operations.commands import update_customer
from tests.scheduling.admin.conftest import FillForm, SaveForm, Url
from tests.scheduling.core.receivers import ScriptedReceiver
from tests.support.matrix import MatrixBuilder
from tests.support.tables import each_row
from tests.support.undrawn import read_refusal

pytestmark = pytest.mark.django_db


def test_template_body_with_error_is_refused(
    matrix: MatrixBuilder, editor: Client, admin_url: Url, fill_form: FillForm
) -> None:
    """`scheduling/core/test_rendering` has the limits of the language."""
    url = admin_url("template_change", matrix.template("guide").pk)
    filled = fill_form(url)
    for body, complaint in (
        ("hi {{ user.nickname }}", "unknown variable “user.nickname”"), ("hi\n{{ user.name", "line 2"),
        ("{{ user.name|default('x') }}", "line 1: “user.name|default(&#x27;x&#x27;)” cannot be read"),
        ("x" * 70_000, "must not be longer than 32768 characters"),
    ):  # fmt: skip
        answer = read_refusal(editor, url, filled | {"texts-0-body": body})
        errors = answer["inline_admin_formsets"][0].formset.errors[0]
        assert list(errors) == ["body"]
        assert complaint in str(errors)


def test_template_with_a_content_type_of_spaces_is_refused() -> None:
    """Forms and files strip or refuse it first; code that stores a row does not."""
    with pytest.raises(ValidationError) as refused:
        Template(key="guide", content_type="  ", category="service").full_clean()
    assert list(refused.value.message_dict) == ["content_type"]


def test_second_text_of_a_language_is_refused(
    matrix: MatrixBuilder, editor: Client, admin_url: Url, fill_form: FillForm
) -> None:
    """Customers would get one of the two, and the export of the configuration could not be applied."""
    url = admin_url("template_change", matrix.template("guide").pk)
    more = {"texts-TOTAL_FORMS": "2", "texts-1-locale": "zh_Hans", "texts-1-body": "您好"}
    answer = read_refusal(editor, url, fill_form(url) | more)
    assert [list(each) for each in answer["inline_admin_formsets"][0].formset.errors] == [[], ["locale"]]
    replaced = fill_form(url) | more | {"texts-0-DELETE": "on"}
    errors = read_refusal(editor, url, replaced | {"texts-1-body": ""})["inline_admin_formsets"][0].formset.errors
    assert [list(each) for each in errors] == [["body"]]
    assert editor.post(url, replaced).status_code == 302
    at_once = fill_form(url) | more | {"texts-1-locale": "zh-TW"}
    assert editor.post(url, at_once).status_code == 302
    forms = read_refusal(editor, url, at_once | {"texts-1-locale": "zh_TW"})["inline_admin_formsets"][0].formset
    assert [list(each) for each in forms.errors] == [[], ["locale"]], "another page added it since this one was shown"


def test_changed_text_is_a_new_template_version(matrix: MatrixBuilder, admin_url: Url, save_form: SaveForm) -> None:
    template = matrix.template("guide")
    save_form(admin_url("template_change", template.pk), **{"texts-0-body": "dear {{ user.name }}"})
    template.refresh_from_db()
    assert (template.version, template.texts.get().body) == (2, "dear {{ user.name }}")
    more = {"texts-TOTAL_FORMS": "3", "texts-1-locale": "en", "texts-1-body": "hi", "texts-2-locale": "fr"}
    changed = {"texts-0-body": "hello", "texts-2-body": "salut", "content_type": "other"}
    save_form(admin_url("template_change", template.pk), **more, **changed)
    template.refresh_from_db()
    assert (template.version, template.texts.count(), template.content_type) == (3, 3, "other")


def test_template_is_created_with_its_texts(editor: Client, admin_url: Url) -> None:
    data = {
        "key": "new", "content_type": "guide", "category": "service", "texts-TOTAL_FORMS": "2",
        "texts-INITIAL_FORMS": "0", "texts-0-locale": "zh-hans", "texts-0-body": "您好 {{ user.name }}",
        "texts-1-locale": "en", "texts-1-body": "hello",
    }  # fmt: skip
    assert editor.post(admin_url("template_add"), data).status_code == 302
    template = Template.objects.get(key="new")
    assert (template.version, [each.body for each in template.texts.all()]) == (1, ["hello", "您好 {{ user.name }}"])


def test_template_preview_renders_for_a_customer(matrix: MatrixBuilder, editor: Client, admin_url: Url) -> None:
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


def test_template_test_is_marked_reaches_its_receiver_and_makes_no_touch(
    matrix: MatrixBuilder, editor: Client, admin_url: Url, receiver: ScriptedReceiver
) -> None:
    url = admin_url("template_send_test", matrix.template("guide").pk)

    def send(channel: ChannelConfig, **to: str) -> Any:
        return read_refusal(editor, url, {"channel": channel.pk, **to})

    page = send(matrix.channel, user_id="ann")
    assert (page["result"]["title"], page["body"]) == ("Delivered", "[Test] hi ann")
    hook = ChannelConfig.objects.create(key="hook", kind="webhook", config={"url": receiver.url})
    assert send(hook)["result"]["title"] == "Delivered"
    assert [call.json["data"]["node"] for call in receiver.calls] == ["test"]
    Community.objects.create(chat_id="c1")
    result = send(ChannelConfig.objects.create(key="robot", kind="wecom"), community="c1")["result"]
    assert (result["title"], "No target to send to" in result["text"]) == ("Not sent", True)
    assert Touch.objects.count() == 0


def test_template_test_invents_no_subject(
    matrix: MatrixBuilder, editor: Client, admin_url: Url, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Mail without a subject shows the beginning of its text."""
    sent: list[Message] = []

    def send_once(_: Any, message: Message) -> Delivered:
        sent.append(message)
        return Delivered()

    monkeypatch.setattr("scheduling.admin.matrix.template.send_once", send_once)
    url = admin_url("template_send_test", matrix.template("guide").pk)
    for subject in ("", "Guide"):
        TemplateText.objects.update(subject=subject)
        editor.post(url, {"channel": matrix.channel.pk, "user_id": "ann"})
    assert [each.subject for each in sent] == ["", "[Test] Guide"]


def test_used_template_is_not_deleted_or_retired(matrix: MatrixBuilder, editor: Client, admin_url: Url) -> None:
    template = matrix.node().template
    assert editor.post(admin_url("template_delete", template.pk), {"post": "yes"}).status_code == 403
    assert "guide" in editor.get(admin_url("template_retire", template.pk)).context["problem"]
    editor.post(admin_url("template_retire", template.pk))
    template.refresh_from_db()
    assert template.retired_at is None


@each_row("language, shown", [("zh-hans", "您好"), ("en", "Dear"), ("fr", "您好")])
def test_lists_show_the_text_of_the_readers_language(
    matrix: MatrixBuilder, editor: Client, admin_url: Url, language: str, shown: str
) -> None:
    template = matrix.template("guide", body="您好，{{ user.name }}")
    matrix.node(template=template)
    TemplateText.objects.filter(template=template).update(locale="zh-hans")
    TemplateText.objects.create(template=template, locale="en", body="Dear {{ user.name }}")
    editor.cookies["django_language"] = language
    for name in ("template_changelist", "node_matrix"):
        page = editor.get(admin_url(name), headers={"accept-language": "zh-hans"}).content.decode()
        assert [each for each in ("您好", "Dear") if each in page] == [shown]
