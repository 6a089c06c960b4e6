"""Two users, or a user and a customer, change the same row; one of them on a page that is hours old."""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from functools import partial
from typing import Any

import pytest
from django.contrib import admin
from django.contrib.auth.models import Group, User
from django.test import Client
from django.urls import reverse
from django.utils.timezone import localtime, now
from django_celery_beat.models import IntervalSchedule, PeriodicTask

from rpa_tasks.admin.flow import FlowForm
from rpa_tasks.admin.platform import PlatformForm
from rpa_tasks.models import Flow, Platform
from scheduling.admin.row_edits import OptimisticLockForm
from scheduling.admin.shown_values import describe_instant
from scheduling.identity import totp
from scheduling.models import (
    ApiKey,
    ChannelConfig,
    Customer,
    IdentityLink,
    Node,
    Stage,
    Template,
    TemplateText,
    TotpDevice,
)  # fmt: skip
from scheduling.models.versioned import lock_for_write
from scheduling.operations import commands
from sessions.admin.policies import CampaignForm, SilencePolicyForm
from sessions.models import Campaign, SilencePolicy
from tests.scheduling.admin.conftest import FillForm, Url, interrupt
from tests.support.matrix import MatrixBuilder
from tests.support.second_connection import SecondConnection, act_behind_locks
from tests.support.tables import each_row
from tests.support.undrawn import read_context

pytestmark = pytest.mark.django_db

SECOND = timedelta(seconds=1)
SALE = datetime(2026, 11, 11, tzinfo=UTC)

CHANGED = "Changed after you opened the page. Reload the page to see the current values."
RELOAD = "Reload the page to see the current values."
HOURLY = {
    "name": "hourly", "task": "scheduling.dispatch_due", "interval": 1, "enabled": "on", "args": "[]", "kwargs": "{}",
    "headers": "{}",
}  # fmt: skip


@pytest.fixture
def node(matrix: MatrixBuilder) -> Node:
    node: Node = matrix.node(rollout_percent=100)
    return node


def model_pages(model: Any) -> Any:
    return admin.site.get_model_admin(model)


def refuse(client: Client, url: str, page: dict[str, Any]) -> str:
    """Post the page, expect the error of a changed row, and return the answer."""
    answer = client.post(url, page)
    assert answer.status_code == 200
    assert RELOAD in answer.content.decode()
    return answer.content.decode()


def test_old_page_does_not_opt_a_customer_in_again(editor: Client, admin_url: Url, fill_form: FillForm) -> None:
    commands.update_customer("ann", {"name": "Ann", "level": "normal", "addresses": {"email": "a@example.org"}})
    url = admin_url("customer_change", Customer.objects.get().pk)
    page = fill_form(url)
    commands.update_customer("ann", {"opted_out": True, "level": "vip", "addresses": {"email": "b@example.org"}})
    answer = refuse(editor, url, {**page, "name": "Anna"})
    assert (CHANGED in answer, 'value="Anna"' in answer) == (True, True)
    ann = Customer.objects.get()
    assert (ann.name, ann.opted_out, ann.level, ann.addresses) == ("Ann", True, "vip", {"email": "b@example.org"})
    assert ann.opted_out_at is not None


def test_activity_of_a_customer_is_no_edit(editor: Client, admin_url: Url, fill_form: FillForm) -> None:
    commands.update_customer("ann", {"name": "Ann"})
    url = admin_url("customer_change", Customer.objects.get().pk)
    page = fill_form(url)
    Customer.objects.update(last_active_at=localtime())
    assert editor.post(url, {**page, "name": "Anna"}).status_code == 302
    ann = Customer.objects.get()
    assert (ann.name, ann.last_active_at is None) == ("Anna", False)


def test_page_without_the_canary_does_not_write_it_after_the_roll_out_pauses(
    node: Node, editor: Client, admin_url: Url, fill_form: FillForm, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Template and canary cannot be edited while an automatic roll-out moves them; then it pauses, and they can."""
    url = admin_url("node_change", node.pk)
    with monkeypatch.context() as running:
        running.setattr("scheduling.admin.matrix.node.has_running_rollout", lambda node: True)
        page = fill_form(url)
    assert not {"template", "canary_percent"} & page.keys()
    Node.objects.filter(pk=node.pk).update(holdout_percent=9)
    refuse(editor, url, {**page, "delay": "44m"})
    stored = Node.objects.get()
    assert (stored.template_id, stored.holdout_percent, stored.delay) == (node.template_id, 9, node.delay)


def test_two_edits_of_one_field_show_who_changed_it_and_save_nothing(
    node: Node, editor: Client, as_member: Callable[[str], Client], admin_url: Url, fill_form: FillForm
) -> None:
    url = admin_url("node_change", node.pk)
    page = fill_form(url)
    before = node.delay
    other = as_member("admin")
    assert other.post(url, {**fill_form(url, other), "rollout_percent": "7"}).status_code == 302
    answer = refuse(editor, url, {**page, "rollout_percent": "50", "delay": "44m"})
    last = Node.history.first()
    assert f"Changed by admin at {describe_instant(last.history_date)}. {RELOAD}" in answer
    node.refresh_from_db()
    assert (node.rollout_percent, node.delay) == (7, before)
    # The page with the error keeps what was typed and still submits the version of the first page.
    assert ('value="50"' in answer, 'value="44m"' in answer) == (True, True)
    assert f'name="row_version" value="{page["row_version"]}"' in answer
    page = fill_form(url)
    assert editor.post(url, {**page, "rollout_percent": "50"}).status_code == 302
    node.refresh_from_db()
    node.rollout_percent = 8
    node.save()
    assert "Changed by system or configuration file at " in refuse(editor, url, page), "no user, so a program"


@pytest.mark.parametrize("edited", [True, False])
def test_only_an_edited_text_outdates_the_page_of_its_template(
    editor: Client, admin_url: Url, fill_form: FillForm, edited: bool
) -> None:
    """A browser's line ends are no edit."""
    template = Template.objects.create(key="greeting", content_type="greeting", version=1)
    text = TemplateText.objects.create(template=template, locale="en", body="Helo,\n{{ user.name }}")
    url = admin_url("template_change", template.pk)
    page = {name: str(value).replace("\n", "\r\n") for name, value in fill_form(url).items()}
    if edited:
        TemplateText.objects.filter(pk=text.pk).update(body="Hello,\n{{ user.name }}")
        refuse(editor, url, {**page, "category": "service"})
    else:
        assert editor.post(url, page).status_code == 302
    text.refresh_from_db()
    assert (text.body, text.history.count()) == ("Hello,\n{{ user.name }}" if edited else "Helo,\n{{ user.name }}", 1)
    assert Template.objects.get().category == template.category


def test_old_page_removes_no_text_that_was_edited_since(editor: Client, admin_url: Url, fill_form: FillForm) -> None:
    template = Template.objects.create(key="greeting", content_type="greeting", version=1)
    texts = [TemplateText.objects.create(template=template, locale=each, body="Helo") for each in ("en", "fr")]
    url = admin_url("template_change", template.pk)
    page = fill_form(url) | {"texts-1-DELETE": "on"}
    TemplateText.objects.filter(pk=texts[1].pk).update(body="Salut")
    refuse(editor, url, page)
    assert template.texts.count() == 2
    assert editor.post(url, fill_form(url) | {"texts-1-DELETE": "on"}).status_code == 302
    assert [each.locale for each in template.texts.all()] == ["en"]


def test_two_edits_of_one_secret_save_the_first(editor: Client, admin_url: Url, fill_form: FillForm) -> None:
    """A page shows no secret, so its fields cannot show that another user replaced it."""
    row = ChannelConfig.objects.create(key="hook", kind="webhook", config={"url": "https://a.example.org/"})
    url = admin_url("channelconfig_change", row.pk)
    page = fill_form(url)
    assert editor.post(url, {**page, "secret_url": "https://b.example.org/"}).status_code == 302
    refuse(editor, url, {**page, "secret_url": "https://c.example.org/"})
    assert ChannelConfig.objects.get().config["url"] == "https://b.example.org/"


def test_old_page_does_not_give_a_disabled_user_access_again(administrator: Client, fill_form: FillForm) -> None:
    bob = User.objects.create_user("bob", password="x", is_staff=True)
    url = reverse("admin:auth_user_change", args=[bob.pk])
    page = fill_form(url, administrator)
    User.objects.filter(pk=bob.pk).update(is_active=False)
    refuse(administrator, url, {**page, "email": "bob@example.org"})
    page = fill_form(url, administrator)
    bob.groups.add(Group.objects.get(name="viewer"))
    refuse(administrator, url, {**page, "email": "bob@example.org"})
    bob.refresh_from_db()
    assert (bob.is_active, bob.email, bob.groups.count()) == (False, "", 1)
    assert administrator.post(url, fill_form(url, administrator, first_name="Bob")).status_code == 302
    assert User.objects.get(pk=bob.pk).first_name == "Bob"


def test_old_page_does_not_link_a_user_with_an_old_subject_again(
    administrator: Client, fill_form: FillForm, settings: Any
) -> None:
    settings.AFTERTOUCH_OIDC_ISSUER = "https://id.example.org"
    bob = User.objects.create_user("bob", password="x")
    link = IdentityLink.objects.create(user=bob, issuer="https://old.example.org", subject="bob-1")
    url = reverse("admin:auth_user_change", args=[bob.pk])
    page = fill_form(url, administrator)
    IdentityLink.objects.update(subject="bob-2")
    refuse(administrator, url, {**page, "email": "bob@example.org"})
    refuse(administrator, url, {**page, "identity_links-0-DELETE": "on"})
    page = fill_form(url, administrator, **{"identity_links-0-subject": "bob-3"})
    assert administrator.post(url, page).status_code == 302
    link.refresh_from_db()
    assert (link.issuer, link.subject) == (settings.AFTERTOUCH_OIDC_ISSUER, "bob-3")


def test_old_page_does_not_enable_a_periodic_task_again(administrator: Client, fill_form: FillForm) -> None:
    hourly = IntervalSchedule.objects.create(every=1, period="hours")
    row = PeriodicTask.objects.create(name="hourly", task="scheduling.dispatch_due", interval=hourly)
    url = reverse("admin:django_celery_beat_periodictask_change", args=[row.pk])
    page = fill_form(url, administrator)
    PeriodicTask.objects.filter(pk=row.pk).update(enabled=False)
    refuse(administrator, url, {**page, "description": "Each hour"})
    PeriodicTask.objects.filter(pk=row.pk).update(enabled=True, total_run_count=7, last_run_at=now())
    assert administrator.post(url, {**page, "description": "Each hour"}).status_code == 302, "a run is no edit"
    row.refresh_from_db()
    assert (row.enabled, row.description, row.total_run_count) == (True, "Each hour", 7)


@pytest.mark.django_db(transaction=True)
def test_of_two_concurrent_saves_the_second_shows_the_error(
    node: Node, editor: Client, as_member: Callable[[str], Client], admin_url: Url, fill_form: FillForm
) -> None:
    """Both requests pass the page's other checks before either of them writes."""
    url = admin_url("node_change", node.pk)
    other, page = as_member("admin"), fill_form(url)

    def post(client: Client, **changes: str) -> int:
        return client.post(url, {**page, **changes}).status_code

    statuses = act_behind_locks(
        lambda: lock_for_write(Node.objects.all()).get(pk=node.pk),
        partial(post, editor, delay="44m"),
        partial(post, other, rollout_percent="7"),
    )

    stored = Node.objects.get()
    saved = (timedelta(minutes=44), 100) if statuses == [302, 200] else (node.delay, 7)
    assert (sorted(statuses), (stored.delay, stored.rollout_percent)) == ([200, 302], saved)


@pytest.mark.django_db(transaction=True)
@each_row("model, sent, act, field", [
    (Stage, {"key": "new", "name": "New", "position": "1"}, lambda: Stage.objects.create(key="new"), "key"),
    (
        ApiKey, {"name": "shop", "scopes": ["events"]},
        lambda: ApiKey.objects.create(name="shop", digest=b"d", scopes=["events"]), "name",
    ),
    (
        PeriodicTask, HOURLY,
        lambda: PeriodicTask.objects.create(name="hourly", task=HOURLY["task"], interval_id=HOURLY["interval"]), "name",
    ),
    (PeriodicTask, HOURLY, lambda: IntervalSchedule.objects.all().delete(), "interval"),
])  # fmt: skip
def test_save_that_meets_another_users_act_is_refused_at_its_field(
    administrator: Client, monkeypatch: pytest.MonkeyPatch, second_connection: SecondConnection,
    model: Any, sent: dict[str, Any], act: Callable[[], Any], field: str,
) -> None:  # fmt: skip
    """The other user acts after the form was checked."""
    PeriodicTask.objects.all().delete()
    IntervalSchedule.objects.get_or_create(pk=HOURLY["interval"], every=1, period="hours")
    save_model, acts = model_pages(model).save_model, [act]

    def save(*args: Any) -> None:
        if acts:
            second_connection(acts.pop())
        save_model(*args)

    monkeypatch.setattr(model_pages(model), "save_model", save)
    answer = administrator.post(reverse(f"admin:{model._meta.app_label}_{model._meta.model_name}_add"), sent)
    assert next(iter(answer.context["adminform"].form.errors)) == field
    assert [str(each) for each in answer.context["messages"]] == []


def test_row_that_is_deleted_while_it_is_retired_is_not_found(
    administrator: Client, admin_url: Url, monkeypatch: pytest.MonkeyPatch
) -> None:
    stage = Stage.objects.create(key="spare", name="Spare")

    def delete_first(row: Any) -> list[str]:
        Stage.objects.filter(pk=row.pk).delete()
        return []

    monkeypatch.setattr(model_pages(Stage), "describe_retirement_effects", delete_first)
    assert administrator.post(admin_url("stage_retire", stage.pk)).status_code == 404


def test_row_that_is_deleted_before_an_act_that_changes_nothing_is_not_found(
    administrator: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    bob = User.objects.create_user("bob")
    TotpDevice.objects.create(user=bob)
    monkeypatch.setattr(totp, "reset_totp", lambda user: bool(User.objects.filter(pk=user.pk).delete()) and False)
    url = reverse("admin:auth_user_reset_second_factor", args=[bob.pk])
    assert administrator.post(url).status_code == 404


@each_row("form, create, sent, column, value", [
    (
        PlatformForm, lambda: Platform.objects.create(key="pdd"),
        {"name": "New", "backlog_limit": "5", "breaker_threshold": "3"}, "name", "New",
    ),
    (
        FlowForm, lambda: Flow.objects.create(platform=Platform.objects.create(key="p"), task_type="t", command=["a"]),
        {
            "command": "true\n{param}", "timeout": "10m", "dedupe_by": "payload", "param_style": "nested",
            "dedupe_window": "1d", "dedupe_rerun": "refuse", "idempotent": "False", "env": "",
        },
        "command", ["true", "{param}"],
    ),
    (
        SilencePolicyForm, lambda: SilencePolicy.objects.create(key="vip", tags=["vip"], threshold=SECOND),
        {
            "tags": "vip", "after": "any", "grace_for": "all", "threshold": "2m", "jitter": "5s", "grace": "0s",
            "max_nudges": "2", "growth": "2",
        },
        "threshold", 120 * SECOND,
    ),
    (
        CampaignForm, lambda: Campaign.objects.create(key="sale", starts_at=SALE, ends_at=SALE + 60 * SECOND),
        {
            "threshold": "40s", "starts_at_0": "2026-11-11", "starts_at_1": "00:00:00", "ends_at_0": "2026-11-12",
            "ends_at_1": "00:00:00", "enabled": "on",
        },
        "threshold", 40 * SECOND,
    ),
])  # fmt: skip
def test_edit_keeps_a_concurrent_retirement(
    administrator: Client, monkeypatch: pytest.MonkeyPatch,
    form: Any, create: Callable[[], Any], sent: dict[str, str], column: str, value: Any,
) -> None:  # fmt: skip
    row, gone = create(), now()
    address = reverse(f"admin:{row._meta.app_label}_{row._meta.model_name}_change", args=[row.pk])
    version = read_context(administrator, address)["adminform"].form["row_version"].value()
    interrupt(monkeypatch, form, lambda: type(row).objects.update(retired_at=gone))
    answer = administrator.post(address, {**sent, "row_version": version, "change_reason": "why"})
    assert answer.status_code == 302, answer.context["adminform"].form.errors
    row.refresh_from_db()
    assert (getattr(row, column), row.retired_at) == (value, gone)


def test_every_form_has_a_version(as_member: Callable[[str], Client], settings: Any) -> None:
    """A form without it writes back what other users changed."""
    settings.AFTERTOUCH_OIDC_ISSUER = "https://id.example.org"  # shows the links with the provider
    request: Any = type("Request", (), {"user": None, "GET": {}})()
    request.user = as_member("admin").get("/admin/").wsgi_request.user
    unversioned = set()
    for model, page in admin.site._registry.items():
        if page.has_change_permission(request):
            row = model()
            inlines = [each for each in page.get_inline_instances(request, row) if each.has_change_permission(request)]
            forms = [each.form for each in inlines if not each.fields or set(each.fields) - set(each.readonly_fields)]
            for each in (page.get_form(request, row, change=True), *forms):
                if not issubclass(each, OptimisticLockForm):
                    unversioned.add((model.__name__, each.__name__))
    assert unversioned == set()
