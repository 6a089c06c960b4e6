"""Text that PostgreSQL cannot store is refused by the form, not by the database."""

from __future__ import annotations

import pytest
from asgiref.sync import async_to_sync
from django.contrib import admin
from django.test import AsyncClient, Client
from django.urls import reverse

from scheduling.models import DelayRule, HarassmentRule, WebhookSubscription
from tests.scheduling.admin.conftest import CheckFormErrors, FormErrors, Url
from tests.support.matrix import MatrixBuilder

pytestmark = pytest.mark.django_db

FILTERS = ("state", "scope", "q", "e", "reason", "node__id__exact")


def lists() -> list[str]:
    """Of all that the back office shows, and their files."""
    pages = [reverse(f"admin:{model._meta.label_lower.replace('.', '_')}_changelist") for model in admin.site._registry]
    return [*pages, *(reverse(f"admin:scheduling_{name}_export", args=["csv"]) for name in ("touch", "failedtask"))]


def test_lists_refuse_nul_characters_with_a_message(administrator: Client) -> None:
    query = "&".join(f"{name}=%00" for name in FILTERS)
    answers = {page: administrator.get(f"{page}?{query}") for page in lists()}
    assert len(answers) > 20
    assert {page: answer.status_code for page, answer in answers.items()} == dict.fromkeys(answers, 400)
    touches = reverse("admin:scheduling_touch_changelist")
    assert "Invalid request" in answers[touches].content.decode()
    assert administrator.get(touches, {"q": "100%00 sure"}).status_code == 200


def test_forms_of_the_matrix_refuse_nul_characters_at_their_field(
    matrix: MatrixBuilder, admin_url: Url, list_form_errors: FormErrors
) -> None:
    """Lists, conditions and mappings are stored as JSON, which takes any text until PostgreSQL refuses it."""
    cap, delays = HarassmentRule.objects.get(kind="cap"), DelayRule.objects.create()
    for url, *changes in (
        (
            admin_url("node_change", matrix.node().pk), {"trigger": "a\0"}, {"tags": "a\0"}, {"cancel_on": "a\0"},
            {"rollout_communities": "a\0"}, {"delay_rules": "a\0=1h, default=1h"},
            {"when-0-field": "chat_id", "when-0-op": "eq", "when-0-value": "a\0"},
            {"when-0-field": "customer.attributes.\0", "when-0-op": "exists"},
        ),
        (admin_url("harassmentrule_change", cap.pk), {"limits": "a\0=1"}),
        (admin_url("delayrule_change", delays.pk), {"by_level": "a\0=1h"}),
    ):  # fmt: skip
        errors = list_form_errors(url, *changes)
        assert [list(each) for each in errors] == [[next(iter(each)).partition("-")[0]] for each in changes]


def test_preview_of_a_text_accepts_a_nul_character(editor: Client, admin_url: Url) -> None:
    sent = {"body": "hi {{ user.name }}", "locale": "en", "subject": "", "user_id": "\0", "chat_id": "\0"}
    assert editor.post(admin_url("template_preview"), sent).json()["problem"] == ""


def test_paths_and_asgi_requests_with_nul_are_refused(administrator: Client) -> None:
    assert administrator.get("/u/a%00b").status_code == 400
    asking = AsyncClient()
    asking.cookies = administrator.cookies
    answer = async_to_sync(asking.get)(reverse("admin:scheduling_touch_changelist"), {"state": "\0"})
    assert answer.status_code == 400


def test_fields_with_a_format_refuse_nul_characters(
    editor: Client, admin_url: Url, check_form_errors: CheckFormErrors
) -> None:
    config = {"url": "https://example.com/in", "secret": "whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw"}
    hook = WebhookSubscription.objects.create(key="crm", config=config, events=["job.ended"])
    wrong = [({name: "a\0"}, name, "Null characters") for name in ("filter_node", "filter_platform", "filter_shop")]
    check_form_errors(admin_url("webhooksubscription_change", hook.pk), *wrong)
