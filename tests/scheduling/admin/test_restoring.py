"""An old version is restored by the row's own form: same checks, same lock, one more entry of the history."""

from __future__ import annotations

from datetime import timedelta

import pytest
from django.test import Client

from scheduling.models import Template
from tests.scheduling.admin.conftest import FillForm, SaveForm, Url
from tests.support.matrix import MatrixBuilder
from tests.support.undrawn import read_context, read_refusal

pytestmark = pytest.mark.django_db


def test_old_version_of_a_node_is_restored_with_reason_by_editors(
    matrix: MatrixBuilder, editor: Client, viewer: Client, admin_url: Url, save_form: SaveForm
) -> None:
    node = matrix.node(delay=timedelta(minutes=15))
    url = admin_url("node_change", node.pk)
    save_form(url, delay="1h", enabled=None)
    old, current = (admin_url("node_simple_history", node.pk, each.pk) for each in node.history.order_by("history_id"))
    link = f"{url}?restore={node.history.earliest().pk}"
    assert link in editor.get(old).content.decode()
    assert "restore=" not in viewer.get(old).content.decode()
    assert "Restore this version" not in editor.get(current).content.decode()
    assert "Nothing has changed yet" in editor.get(link).content.decode()
    assert read_context(viewer, link)["adminform"].form["enabled"].value() is False, "a viewer gets the values of now"
    for wrong in ("999999", "x"):
        assert editor.get(f"{url}?restore={wrong}").status_code == 404
        assert editor.get(admin_url("node_simple_history", node.pk, wrong)).status_code == 404
        assert editor.get(admin_url("node_simple_history", wrong, node.history.earliest().pk)).status_code == 404
        assert editor.get(admin_url("node_history", wrong)).status_code == 404
    node.refresh_from_db()
    assert node.delay == timedelta(hours=1)
    save_form(link)
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
    assert "template" in read_refusal(editor, link, data)["adminform"].form.errors
    node.refresh_from_db()
    assert node.template.key == "other"


def test_text_of_a_template_is_restored(matrix: MatrixBuilder, admin_url: Url, save_form: SaveForm) -> None:
    template = matrix.template("guide", body="first text")
    version = template.history.first()
    text = template.texts.get()
    text.body = "second text"
    text.save()
    version.history_date = text.history.order_by("history_id").first().history_date
    version.save()
    save_form(f"{admin_url('template_change', template.pk)}?restore={version.pk}")
    text.refresh_from_db()
    assert text.body == "first text"
