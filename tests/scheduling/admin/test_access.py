from __future__ import annotations

import re
from collections.abc import Callable

import pytest
from django.test import Client
from django.urls import reverse

from scheduling.models import ApiKey, Pause, Touch
from scheduling.models.access import digest_api_key
from scheduling.operations.commands import create_api_key, pause_scope
from tests.scheduling.admin.conftest import Url
from tests.support.matrix import MatrixBuilder, RecordEvent
from tests.support.undrawn import read_context, read_refusal

pytestmark = pytest.mark.django_db


def test_api_key_is_shown_once(as_member: Callable[[str], Client], admin_url: Url) -> None:
    client = as_member("admin")
    page = client.post(admin_url("apikey_add"), {"name": "shop", "scopes": ["events", "touches"]})
    key = page.context["key"]
    row = ApiKey.objects.get()
    assert (row.digest, row.scopes) == (digest_api_key(key), ["events", "touches"])
    assert "no-store" in page["cache-control"]
    assert key in page.content.decode()
    assert key not in client.get(admin_url("apikey_change", row.pk)).content.decode()
    assert key not in str(client.cookies)


def test_api_key_needs_scope_unique_name_and_a_rate(as_member: Callable[[str], Client], admin_url: Url) -> None:
    """A limit of zero would mean the default limit."""
    client = as_member("admin")
    create_api_key("shop", ["events"])
    data = {"name": "shop", "rate_per_minute": "0"}
    errors = read_refusal(client, admin_url("apikey_add"), data)["adminform"].form.errors
    assert set(errors) == {"name", "scopes", "rate_per_minute"}
    assert ApiKey.objects.count() == 1


def test_revoked_api_key_stays_revoked(as_member: Callable[[str], Client], admin_url: Url) -> None:
    client = as_member("admin")
    create_api_key("shop", ["events"])
    row = ApiKey.objects.get()
    client.post(admin_url("apikey_revoke", row.pk))
    row.refresh_from_db()
    first = row.revoked_at
    assert first is not None
    client.post(admin_url("apikey_revoke", row.pk))
    row.refresh_from_db()
    assert row.revoked_at == first
    assert client.post(admin_url("apikey_delete", row.pk), {"post": "yes"}).status_code == 403


def test_pause_is_shown_on_every_page_until_it_ends(
    matrix: MatrixBuilder, operator: Client, viewer: Client, admin_url: Url
) -> None:
    node = matrix.node()
    to_pause = operator.get(admin_url("node_pause_or_resume", node.pk))["location"]
    assert to_pause == f"{admin_url('pause_add')}?scope=node%3Aguide"
    for scope in ("node:guide", "all"):
        operator.post(admin_url("pause_add"), {"scope": scope, "reason": "wrong text"})
    row = Pause.objects.get(scope="node:guide")
    assert (row.reason, row.paused_by.username) == ("wrong text", "operator")
    for url in (reverse("admin:index"), admin_url("node_matrix")):
        page = viewer.get(url).content.decode()
        assert all(words in page for words in ("Paused: node guide", "Paused: everything", "wrong text"))
    to_resume = operator.get(admin_url("node_pause_or_resume", node.pk))["location"]
    operator.post(to_resume)
    assert Pause.objects.get().scope == "all"
    assert "Paused: node guide" not in viewer.get(reverse("admin:index")).content.decode()
    assert "pause had already ended" in operator.post(to_resume, follow=True).content.decode()
    assert read_refusal(operator, admin_url("pause_add"), {"scope": "node:nowhere"})["form"].errors


def test_pause_shows_the_touches_that_it_holds(
    matrix: MatrixBuilder, record_event: RecordEvent, operator: Client, admin_url: Url
) -> None:
    matrix.node()
    record_event()
    record_event(user="ben")
    Touch.objects.filter(customer__user_id="ann").update(paused_by="node:guide")
    pause_scope("node:guide")
    page = operator.get(admin_url("pause_changelist")).content.decode()
    assert re.search(r'paused_by=node%3Aguide">1<', page)
    held = read_context(operator, admin_url("touch_changelist"), {"paused_by": "node:guide"})["cl"].result_list
    assert [row.customer.user_id for row in held] == ["ann"]
