"""Two people, or a person and a customer, change the same row; one of them on a page that is hours old."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
from django.contrib import admin
from django.test import Client

from scheduling.models import ChannelConfig, Community, Customer, HarassmentRule, Node, Template, TemplateText
from scheduling.operations import commands

pytestmark = pytest.mark.django_db

Url = Callable[..., str]


@pytest.fixture
def node(matrix: Any) -> Node:
    node: Node = matrix.node(rollout_percent=100)
    return node


def test_an_old_page_opts_no_customer_in_again(editor: Client, admin_url: Url, filled: Any) -> None:
    commands.update_customer("ann", {"name": "Ann", "level": "normal", "addresses": {"email": "a@example.org"}})
    url = admin_url("customer_change", Customer.objects.get().pk)
    page = filled(url)
    commands.update_customer("ann", {"opted_out": True, "level": "vip", "addresses": {"email": "b@example.org"}})
    assert editor.post(url, {**page, "name": "Anna"}).status_code == 302
    ann = Customer.objects.get()
    assert (ann.name, ann.opted_out, ann.level, ann.addresses) == ("Anna", True, "vip", {"email": "b@example.org"})
    assert ann.opted_out_at is not None


def test_what_was_ticked_on_purpose_is_saved(editor: Client, admin_url: Url, filled: Any) -> None:
    commands.update_customer("ann", {"opted_out": True})
    url = admin_url("customer_change", Customer.objects.get().pk)
    page = filled(url)
    del page["opted_out"]
    assert editor.post(url, page).status_code == 302
    assert not Customer.objects.get().opted_out


def test_an_old_page_switches_no_node_on_again(node: Node, editor: Client, admin_url: Url, filled: Any) -> None:
    url = admin_url("node_change", node.pk)
    page = filled(url)
    Node.objects.filter(pk=node.pk).update(enabled=False, canary_percent=0, rollout_percent=7)
    assert editor.post(url, {**page, "delay": "44m"}).status_code == 302
    node.refresh_from_db()
    assert (node.delay.total_seconds(), node.enabled, node.rollout_percent) == (44 * 60, False, 7)


def test_a_page_without_the_canary_leaves_it_as_a_paused_roll_out_left_it(
    node: Node, editor: Client, admin_url: Url, filled: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While a guarded roll-out moves them, template and canary cannot be edited; then it pauses, and they can."""
    url = admin_url("node_change", node.pk)
    with monkeypatch.context() as meanwhile:
        meanwhile.setattr("scheduling.admin.matrix.node.is_guarded", lambda node: True)
        page = filled(url)
    assert not {"template", "initial-template", "canary_percent", "initial-canary_percent"} & page.keys()
    Node.objects.filter(pk=node.pk).update(holdout_percent=9)
    answer = editor.post(url, {**page, "delay": "44m"})
    assert answer.status_code == 302, answer.context["adminform"].form.errors
    stored = Node.objects.get()
    assert (stored.template_id, stored.holdout_percent) == (node.template_id, 9)
    assert stored.delay == timedelta(minutes=44)


def test_two_that_changed_the_same_are_told_and_nothing_is_saved(
    node: Node, editor: Client, admin_url: Url, filled: Any
) -> None:
    url = admin_url("node_change", node.pk)
    page = filled(url)
    Node.objects.filter(pk=node.pk).update(rollout_percent=7)
    answer = editor.post(url, {**page, "rollout_percent": "50", "delay": "44m"})
    assert (
        "Another user changed this after you opened the page. Current value: 7. Reload the page"
        in answer.content.decode()
    )
    before = node.delay
    node.refresh_from_db()
    assert (node.rollout_percent, node.delay) == (7, before)
    # The page that tells so still knows what the first one showed.
    assert 'name="initial-rollout_percent" value="100"' in answer.content.decode()


def test_two_that_changed_the_same_alike_agree(node: Node, editor: Client, admin_url: Url, filled: Any) -> None:
    url = admin_url("node_change", node.pk)
    page = filled(url)
    Node.objects.filter(pk=node.pk).update(rollout_percent=7)
    assert editor.post(url, {**page, "rollout_percent": "7"}).status_code == 302


def test_a_text_that_somebody_else_mended_stays_mended(editor: Client, admin_url: Url, filled: Any) -> None:
    template = Template.objects.create(content_type="greeting", version=1)
    text = TemplateText.objects.create(template=template, locale="en", body="Helo,\n{{ user.name }}")
    url = admin_url("template_change", template.pk)
    page = filled(url)
    TemplateText.objects.filter(pk=text.pk).update(body="Hello,\n{{ user.name }}")
    assert editor.post(url, page).status_code == 302
    text.refresh_from_db()
    assert text.body == "Hello,\n{{ user.name }}"


def test_a_channel_keeps_what_somebody_else_said_of_repeats(editor: Client, admin_url: Url, filled: Any) -> None:
    row = ChannelConfig.objects.create(
        key="hook", kind="webhook", config={"url": "https://a.example.org/"}, idempotent=True
    )
    url = admin_url("channelconfig_change", row.pk)
    page = filled(url)
    ChannelConfig.objects.filter(pk=row.pk).update(idempotent=False)
    assert editor.post(url, {**page, "retry_delays": "10s, 1m"}).status_code == 302
    row.refresh_from_db()
    assert (row.idempotent, row.retry_delays) == (False, [10, 60])


def test_a_rule_keeps_the_limit_that_somebody_else_set(editor: Client, admin_url: Url, filled: Any) -> None:
    rule = HarassmentRule.objects.create(kind="cap", limit=3, window=timedelta(hours=24))
    url = admin_url("harassmentrule_change", rule.pk)
    page = filled(url)
    HarassmentRule.objects.filter(pk=rule.pk).update(limit=1)
    assert editor.post(url, page).status_code == 302
    rule.refresh_from_db()
    assert rule.limit == 1


def test_secrets_are_not_among_what_a_page_remembers(editor: Client, admin_url: Url) -> None:
    row = Community.objects.create(chat_id="c1", targets={"wecom": {"url": "https://a.example.org/?key=hush"}})
    hook = ChannelConfig.objects.create(
        key="hook", kind="webhook", config={"url": "https://a.example.org/?key=hush", "secret": "whsec_aHVzaA=="}
    )
    pages = [editor.get(admin_url("community_change", row.pk)), editor.get(admin_url("channelconfig_change", hook.pk))]
    assert not [page for page in pages if "hush" in page.content.decode() or "aHVzaA" in page.content.decode()]


def test_every_page_remembers_what_it_shows(as_member: Any) -> None:
    """One that is not a `OptimisticLockForm` would write back what others changed."""
    from scheduling.admin.merging import OptimisticLockForm

    ours = {"scheduling", "rpa_tasks", "chat_sessions"}
    request: Any = type("Request", (), {"user": None, "GET": {}})()
    request.user = as_member("admin").get("/admin/").wsgi_request.user
    forgetful = set()
    for model, page in admin.site._registry.items():
        if model._meta.app_label in ours and page.has_change_permission(request):
            inlines = [each for each in page.get_inline_instances(request) if each.has_change_permission(request)]
            forms = [page.get_form(request, None, change=True), *(each.form for each in inlines)]
            forgetful |= {(model.__name__, form.__name__) for form in forms if not issubclass(form, OptimisticLockForm)}
    assert forgetful == set()
