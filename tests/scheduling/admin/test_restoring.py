"""An old version is restored by the row's own form: same checks, same lock, one more entry of the history."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
from django.test import Client

from scheduling.models import Template
from tests.support.matrix import MatrixBuilder

pytestmark = pytest.mark.django_db

Url = Callable[..., str]
FillForm = Callable[..., dict[str, Any]]


def test_old_version_of_a_node_is_restored_with_reason(
    matrix: MatrixBuilder, editor: Client, admin_url: Url, fill_form: FillForm
) -> None:
    node = matrix.node(delay=timedelta(minutes=15))
    url = admin_url("node_change", node.pk)
    editor.post(url, fill_form(url, delay="1h", enabled=None))
    old, current = node.history.order_by("history_id")
    shown = editor.get(admin_url("node_simple_history", node.pk, old.pk))
    link = f"{url}?restore={old.pk}"
    assert link in shown.content.decode()
    assert (
        "Restore this version" not in editor.get(admin_url("node_simple_history", node.pk, current.pk)).content.decode()
    )
    page = editor.get(link)
    assert "Nothing has changed yet" in page.content.decode()
    assert page.context["adminform"].form["delay"].value() in ("15m", timedelta(minutes=15))
    node.refresh_from_db()
    assert node.delay == timedelta(hours=1)
    answer = editor.post(link, fill_form(link))
    assert answer.status_code == 302, answer.context["adminform"].form.errors
    node.refresh_from_db()
    assert (node.delay, node.enabled, node.version) == (timedelta(minutes=15), True, 3)
    assert node.history.first().history_change_reason.startswith("version of ")


def test_restoring_shows_errors_of_todays_configuration(
    matrix: MatrixBuilder, editor: Client, admin_url: Url, fill_form: FillForm
) -> None:
    node = matrix.node()
    old = node.history.get()
    node.template = matrix.template("other")
    node.save()
    link = f"{admin_url('node_change', node.pk)}?restore={old.pk}"
    data = fill_form(link)
    Template.objects.get(key="guide").delete()
    answer = editor.post(link, data)
    assert "template" in answer.context["adminform"].form.errors
    node.refresh_from_db()
    assert node.template.key == "other"


def test_text_of_a_template_is_restored(
    matrix: MatrixBuilder, editor: Client, admin_url: Url, fill_form: FillForm
) -> None:
    template = matrix.template("guide", body="first text")
    version = template.history.first()
    text = template.texts.get()
    text.body = "second text"
    text.save()
    link = f"{admin_url('template_change', template.pk)}?restore={version.pk}"
    data = fill_form(link)
    version.history_date = text.history.order_by("history_id").first().history_date
    version.save()
    data = fill_form(link)
    assert "first text" in data.values()
    editor.post(link, data)
    text.refresh_from_db()
    assert text.body == "first text"


def test_viewer_gets_no_link_and_unknown_version_is_404(
    matrix: MatrixBuilder, viewer: Client, editor: Client, admin_url: Url
) -> None:
    node = matrix.node()
    old = node.history.get()
    node.enabled = False
    node.save()
    assert "restore=" not in viewer.get(admin_url("node_simple_history", node.pk, old.pk)).content.decode()
    page = viewer.get(f"{admin_url('node_change', node.pk)}?restore={old.pk}")
    assert page.context["adminform"].form["enabled"].value() is False, "a viewer gets the values of now"
    for wrong in ("999999", "x", "9" * 40):
        assert editor.get(f"{admin_url('node_change', node.pk)}?restore={wrong}").status_code == 404
