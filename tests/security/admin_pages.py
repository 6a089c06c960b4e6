"""The table of rights: what each role may see and do at each address of the back office.

`MODELS` holds the pages that every model has; `PAGES` holds all others, by the name of the address; `ACTIONS` holds the
actions of the lists. An address without a row fails the sweep in `test_admin_rights`.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from enum import IntEnum
from typing import Any
from uuid import uuid4

from django.apps import apps
from django.contrib.auth.models import Group, User
from django.urls import reverse
from django.utils.timezone import now
from django_celery_beat.models import (
    ClockedSchedule,
    CrontabSchedule,
    IntervalSchedule,
    PeriodicTask,
)

from rpa_tasks.models import (
    Breaker,
    DemoOrder,
    DemoWatermark,
    Evidence,
    ExecutionNode,
    Flow,
    Job,
    Lane,
    LoginState,
    Platform,
    Shop,
    TakeOver,
)
from scheduling.audit import record_action
from scheduling.customers import imports
from scheduling.delivery import routing
from scheduling.experiments import drafts, rollouts
from scheduling.identity import invitations, totp
from scheduling.models import (
    AlertReceiver,
    ApiKey,
    AuditEntry,
    BulkAction,
    Calendar,
    ChannelConfig,
    Community,
    Complaint,
    ConfigDraft,
    Customer,
    CustomerImport,
    DelayRule,
    Event,
    EventType,
    FailedLogin,
    FailedTask,
    HarassmentRule,
    Holdout,
    Invitation,
    Node,
    Pause,
    SignIn,
    Stage,
    Template,
    TemplateText,
    Touch,
    WebhookMessage,
    WebhookSubscription,
)
from scheduling.operations.commands import create_api_key
from scheduling.operations.failed_tasks import Actor
from scheduling.operations.undo import offer_undo
from scheduling.webhooks import pause_endpoint
from sessions.models import Campaign, SilencePolicy
from tests.rpa_tasks.admin.conftest import Market
from tests.support.drafts import open_draft
from tests.support.matrix import MatrixBuilder

WEBHOOK = {"url": "https://example.com/in", "secret": "whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw"}


class Role(IntEnum):
    """Each role may do what the one before it may."""

    ANONYMOUS = 0
    STAFF = 1  #: may log in, and nothing else
    VIEWER = 2
    OPERATOR = 3
    EDITOR = 4
    ADMIN = 5
    NOBODY = 6


ANONYMOUS, STAFF, VIEWER, OPERATOR, EDITOR, ADMIN, NOBODY = Role

Data = Mapping[str, Any]
Args = Callable[[User], tuple[Any, ...]]


def no_args(user: User) -> tuple[Any, ...]:
    return ()


@dataclass(frozen=True, slots=True)
class Page:
    """Return the rights of one URL."""

    see: Role  #: the least role whose GET is answered
    do: Role = NOBODY  #: the least role whose POST takes effect
    args: Args = no_args  #: makes or finds the row that the address names
    query: str | Callable[[], str] = ""
    data: Data = field(default_factory=dict)  #: what the POST changes of the form's initial values
    form: bool = True  #: False: no GET shows the form, `data` is the whole of it
    writes: bool = True  #: False: a POST that is allowed changes no row
    notes: bool = False  #: the GET leaves an entry in the log
    safe: bool = False  #: a POST is refused for every user
    hides: bool = False  #: who may not is answered 404


@dataclass(frozen=True, slots=True)
class Rights:
    """The least role for each page of a model."""

    view: Role
    add: Role
    change: Role
    delete: Role
    row: Args  #: to look at and to change
    spare: Args = no_args  #: to delete: nothing refers to it
    changed: Data = field(default_factory=dict)
    added: Data = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Action:
    do: Role
    rows: Args
    data: Data = field(default_factory=dict)
    writes: bool = True  #: False: it leads to a page that does it


def first(model: Any, **wanted: Any) -> Args:
    return lambda user: (model._default_manager.filter(**wanted).order_by("pk").values_list("pk", flat=True)[0],)


def pk_of(model: Any, **wanted: Any) -> Callable[[], str]:
    return lambda: str(model._default_manager.filter(**wanted).values_list("pk", flat=True)[0])


def created(make: Callable[[], Any]) -> Args:
    return lambda user: (make().pk,)


def spare(model: Any, **values: Any) -> Args:
    """A row that nothing refers to."""
    return created(lambda: model._default_manager.create(**{"key": "spare"} | resolved(values)))


def resolved(values: Data) -> dict[str, Any]:
    return {name: value() if callable(value) else value for name, value in values.items()}


def build(matrix: MatrixBuilder, record_event: Callable[..., Any]) -> None:
    """Make a row of everything."""
    from tests.scheduling.core.conftest import deliver

    node = matrix.node("guide", canary_template=matrix.template("guide-v2"), delay=timedelta(0))
    matrix.node("later", trigger="signup.succeeded", template=matrix.template("later"), delay=timedelta(days=1))
    matrix.node("broken", trigger="order.paid", template=matrix.template("broken", body="{{ event.data.order_no }}"))
    matrix.node("rolled", trigger="x.y", template=matrix.template("old"), canary_template=matrix.template("new"))
    for type in ("material.downloaded", "order.paid", "complaint.received"):
        deliver(record_event(type, chat_id="c1").task_ids)
    record_event("signup.succeeded")
    EventType.objects.get_or_create(key="signup.succeeded")
    Community.objects.get_or_create(chat_id="c1")
    DelayRule.objects.get_or_create(pk=1)
    Holdout.objects.get_or_create(pk=1)
    Calendar.objects.get_or_create(key="china")
    Pause.objects.create(scope=f"node:{node.key}")
    Complaint.objects.get_or_create(customer=Customer.objects.get(), defaults={"event": Event.objects.latest("pk")})
    create_api_key("shop", ["events"])
    ChannelConfig.objects.create(key="hook", kind="webhook", config={"url": "https://example.com/in"})
    AlertReceiver.objects.create(channel=matrix.channel, community=Community.objects.get())
    hook = WebhookSubscription.objects.create(key="crm", config=WEBHOOK, events=["job.ended"])
    WebhookMessage.objects.create(
        subscription=hook, type="job.ended", object_key="job:1", occurred_at=now(), data={}, state="delivered"
    )
    pause_endpoint(WebhookSubscription.objects.create(key="rests", config=WEBHOOK, events=["job.ended"]))
    record_action("acted", ("scheduling.node", 1), actor="spare")
    FailedLogin.objects.create(digest="d", address="10.0.0.1", tries=3, last_at=now())
    BulkAction.objects.create(
        action="retry", actor_name="u", reason="r", filter={"state": "open"}, per_second=1, total=3
    )
    store_import("ready")
    rollouts.start_rollout(Node.objects.get(key="rolled").pk, {}, Actor("ops"))
    market = Market()
    market.running("s1")
    market.waiting("s1", dedupe_key="a", delay=timedelta(hours=1))
    market.failed("s2")
    gone = now() - timedelta(days=9)
    ExecutionNode.objects.create(name="n1", seen_at=gone, started_at=now(), slots=5, queues=["high"])
    TakeOver.objects.create(
        shop=Shop.objects.get(shop_id="s1"), lease_no=1, username="ann", node="n1", lease_until=now(), ended_at=now(),
        end="ended",
    )  # fmt: skip
    DemoOrder.objects.create(shop_id="s1", order_no="A1", version=1, status="paid", buyer="ann", amount="9.90")
    DemoWatermark.objects.create(shop_id="s1")
    SilencePolicy.objects.get_or_create(key="vip")
    Campaign.objects.create(key="sale", starts_at=now(), ends_at=now() + timedelta(days=1))
    hourly = CrontabSchedule.objects.create(minute="0")
    PeriodicTask.objects.create(name="p1", task="scheduling.dispatch_due", crontab=hourly)
    order = {"platform": "pdd", "task_type": "sync_order", "shops": "all"}
    interval = IntervalSchedule.objects.create(every=10, period="minutes")
    PeriodicTask.objects.create(
        name="p2", task="rpa_tasks.publish_for_shops", interval=interval, kwargs=json.dumps(order)
    )
    ClockedSchedule.objects.create(clocked_time=now() + timedelta(days=1))
    Group.objects.create(name="spare")
    spare = User.objects.create_user("spare", password="x")
    invitations.create_invitation("bob", "bob@example.com", "viewer", spare)
    text = drafts.export_live_draft().replace("limit: 3", "limit: 4")
    open_draft(spare, text)
    ConfigDraft.objects.update(state="done")


# --- rows in the state that an address needs -----------------------------------------------------------------------


def find_model(name: str) -> Any:
    app, _under, model = name.rpartition("_")
    return apps.get_model(app, model)


def retired(model: Any, **wanted: Any) -> Args:
    def args(user: User) -> tuple[Any, ...]:
        (pk,) = first(model, **wanted)(user)
        model._default_manager.filter(pk=pk).update(retired_at=now())
        return (pk,)

    return args


def with_values(model: Any, wanted: Data, **values: Any) -> Args:
    def args(user: User) -> tuple[Any, ...]:
        (pk,) = first(model, **wanted)(user)
        model._default_manager.filter(pk=pk).update(**values)
        return (pk,)

    return args


def disabled_customer(user: User) -> tuple[Any, ...]:
    Customer.objects.update(addresses={"email": "ann@example.com"})
    routing.store_disabled_targets(
        [(ChannelConfig.objects.get(key="log").pk, routing.digest_address("ann@example.com"), "", "bounced")]
    )
    return (Customer.objects.get().pk,)


def pdd() -> Platform:
    return Platform.objects.get(key="pdd")


SPARE_FLOW = created(lambda: Flow.objects.create(platform=pdd(), task_type="spare", command=["true"]))
SPARE_SHOP = created(lambda: Shop.objects.create(platform=pdd(), shop_id="spare"))
SPARE_CAMPAIGN = spare(
    Campaign, starts_at=lambda: now() + timedelta(days=3), ends_at=lambda: now() + timedelta(days=4)
)  # fmt: skip


def spare_template() -> Template:
    template = Template.objects.create(key="spare", content_type="spare")
    TemplateText.objects.create(template=template, body="hi")
    return template


def spare_node() -> Node:
    return Node.objects.create(
        key="spare", stage=Stage.objects.get(key="presale"), trigger="a.b", template=spare_template(),
        channel=ChannelConfig.objects.get(key="log"),
    )  # fmt: skip


def open_breaker(user: User) -> tuple[Any, ...]:
    platform = pdd()
    Breaker.objects.filter(platform=platform).update(errors=5, open_until=now() + timedelta(hours=1))
    return (platform.pk,)


def shop_with_lost_node(user: User) -> tuple[Any, ...]:
    shop = Shop.objects.get(shop_id="s2")
    Lane.objects.filter(shop=shop).update(home="n9")
    return (shop.pk,)


def shop_with_reporting_node(user: User) -> tuple[Any, ...]:
    ExecutionNode.objects.update(seen_at=now())
    return (Shop.objects.get(shop_id="s2").pk,)


def node_with_shop(user: User) -> tuple[Any, ...]:
    Lane.objects.filter(shop__shop_id="s2").update(home="n1")
    return ("n1",)


def undone_pause(user: User) -> tuple[Any, ...]:
    pause = Pause.objects.get(scope="node:guide")
    return (offer_undo(user, "pause", [pause.scope], given={"pause": pause.pk}),)


def own_draft(user: User) -> tuple[Any, ...]:
    live = drafts.export_live_draft()
    ConfigDraft.objects.get_or_create(owner=user, defaults={"base": live, "document": live})
    return ()


def open_task(*more: Any) -> Args:
    return lambda user: (FailedTask.objects.filter(state="open", origin="touch")[0].pk, *more)


def evidence(user: User) -> tuple[Any, ...]:
    piece = Evidence.objects.all()[0]
    return (piece.run.job_id, piece.pk)


def store_import(state: str) -> CustomerImport:
    row = imports.create_import("people.csv", 30, actor="ops")
    if state != "uploading":
        imports.store_part(row.pk, 0, b"user_id,name\nann,Ann\nbob,Bob\n".ljust(30))
    CustomerImport.objects.filter(pk=row.pk).update(state=state, counts={"changed": 1})
    return row


def own_sign_in(user: User) -> tuple[Any, ...]:
    """A sign-in of the user in another browser."""
    return (SignIn.objects.create(user=user, digest=uuid4().hex, address="192.0.2.1").pk,)


def open_invitation(user: User) -> tuple[Any, ...]:
    inviter, _ = User.objects.get_or_create(username="inviter", is_superuser=True)
    return (invitations.create_invitation("eve", "", "viewer", inviter)[1],)


def user_with_second_factor(user: User) -> tuple[Any, ...]:
    (pk,) = first(User, username="spare")(user)
    totp.start_enrolment(User.objects.get(pk=pk))
    return (pk,)


RETIRABLE = {
    "scheduling_calendar": spare(Calendar, position=1),
    "scheduling_channelconfig": spare(ChannelConfig, kind="log"),
    "scheduling_community": first(Community),
    "scheduling_node": first(Node, key="later"),
    "scheduling_harassmentrule": first(HarassmentRule, kind="dedupe"),
    "scheduling_stage": spare(Stage),
    "scheduling_template": created(spare_template),
    "scheduling_webhooksubscription": first(WebhookSubscription, key="crm"),
    "rpa_tasks_flow": first(Flow),
    "rpa_tasks_platform": spare(Platform),
    "rpa_tasks_shop": first(Shop, shop_id="s2"),
    "chat_sessions_silencepolicy": first(SilencePolicy, key="vip"),
    "chat_sessions_campaign": first(Campaign),
}
WHEN = {"starts_at_0": "2027-01-01", "starts_at_1": "00:00", "ends_at_0": "2027-01-02", "ends_at_1": "00:00"}

MODELS: dict[str, Rights] = {
    # What people configure: viewers look, editors write.
    "scheduling_stage": Rights(
        VIEWER, EDITOR, EDITOR, EDITOR, first(Stage), spare(Stage),
        {"name": "Other"}, {"key": "new", "name": "New", "position": "3"},
    ),
    "scheduling_template": Rights(
        VIEWER, EDITOR, EDITOR, EDITOR, first(Template, key="guide"), created(spare_template),
        {"texts-0-body": "other"}, {"key": "fresh", "content_type": "fresh", "texts-0-body": "hi"},
    ),
    "scheduling_node": Rights(
        VIEWER, EDITOR, EDITOR, EDITOR, first(Node, key="later"), created(spare_node),
        {"delay": "3h"},
        {"key": "fresh", "trigger": "a.b", "delay": "1h", "stage": pk_of(Stage, key="presale"),
         "template": pk_of(Template, key="guide"), "channel": pk_of(ChannelConfig, key="log")},
    ),
    "scheduling_channelconfig": Rights(
        VIEWER, EDITOR, EDITOR, EDITOR, first(ChannelConfig), spare(ChannelConfig, kind="log"),
        {"timeout": "7s"}, {"key": "new", "kind": "log"},
    ),
    "scheduling_community": Rights(
        VIEWER, EDITOR, EDITOR, NOBODY, first(Community), first(Community), {"name": "Other"}, {"chat_id": "c2"},
    ),
    "scheduling_delayrule": Rights(
        VIEWER, NOBODY, EDITOR, NOBODY, first(DelayRule), first(DelayRule), {"default": "9h"},
    ),
    "scheduling_calendar": Rights(
        VIEWER, EDITOR, EDITOR, EDITOR, first(Calendar, key="china"),
        spare(Calendar, position=1), {"country": "DE"},
        {"key": "new", "country": "DE", "timezone": "Europe/Berlin", "position": "2"},
    ),
    "scheduling_holdout": Rights(
        VIEWER, NOBODY, EDITOR, NOBODY, first(Holdout), first(Holdout), {"percent": "9"},
    ),
    "scheduling_harassmentrule": Rights(
        VIEWER, EDITOR, EDITOR, NOBODY, first(HarassmentRule, kind="cap"), first(HarassmentRule, kind="cap"),
        {"limit": "9"}, {"kind": "cap", "limit": "2", "window": "1h"},
    ),
    "scheduling_eventtype": Rights(
        VIEWER, EDITOR, EDITOR, EDITOR, first(EventType), created(lambda: EventType.objects.create(key="spare.x")),
        {"name": "Other"}, {"key": "new.type", "name": "New"},
    ),
    "scheduling_customer": Rights(
        VIEWER, EDITOR, EDITOR, NOBODY, first(Customer), first(Customer), {"name": "Other"}, {"user_id": "new"},
    ),
    "scheduling_alertreceiver": Rights(
        VIEWER, NOBODY, EDITOR, NOBODY, first(AlertReceiver), first(AlertReceiver),
        {"channel": pk_of(ChannelConfig, key="hook"), "community": ""},
    ),
    "scheduling_webhooksubscription": Rights(
        VIEWER, EDITOR, EDITOR, EDITOR, first(WebhookSubscription, key="crm"),
        created(lambda: WebhookSubscription.objects.create(key="spare", config=WEBHOOK, events=["job.ended"])),
        {"enabled": ""}, {"key": "new", "events": ["job.ended"], "secret_url": WEBHOOK["url"],
                          "secret_secret": WEBHOOK["secret"]},
    ),
    "rpa_tasks_platform": Rights(
        VIEWER, EDITOR, EDITOR, EDITOR, first(Platform), spare(Platform),
        {"name": "Other"}, {"key": "new"},
    ),
    # A flow is added with its command, for which editors lack `define_command`. The group "command editor" has it: see
    # tests/rpa_tasks/admin/test_shops.py, as this table orders roles in one line.
    "rpa_tasks_flow": Rights(
        VIEWER, ADMIN, EDITOR, EDITOR, first(Flow), SPARE_FLOW,
        {"timeout": "77s"},
        {"platform": pk_of(Platform, key="pdd"), "task_type": "new_type", "command": "true\n{param}", "timeout": "60s",
         "idempotent": "False"},
    ),
    "rpa_tasks_shop": Rights(
        VIEWER, EDITOR, EDITOR, EDITOR, first(Shop, shop_id="s2"), SPARE_SHOP,
        {"name": "Other"}, {"platform": pk_of(Platform, key="pdd"), "shop_id": "new"},
    ),
    "chat_sessions_silencepolicy": Rights(
        VIEWER, EDITOR, EDITOR, NOBODY, first(SilencePolicy, key="vip"), first(SilencePolicy, key="vip"),
        {"threshold": "77s"},
        {"key": "new", "after": "any", "grace_for": "all", "threshold": "30s", "jitter": "0s", "grace": "0s"},
    ),
    "chat_sessions_campaign": Rights(
        VIEWER, EDITOR, EDITOR, EDITOR, first(Campaign), SPARE_CAMPAIGN,
        {"threshold": "77s"}, {"key": "new", "threshold": "60s", **WHEN},
    ),
    # What is stopped and what is tried.
    "scheduling_pause": Rights(
        VIEWER, OPERATOR, NOBODY, NOBODY, first(Pause), first(Pause), {}, {"scope": "all", "reason": "r"},
    ),
    "scheduling_configdraft": Rights(
        VIEWER, EDITOR, NOBODY, ADMIN, first(ConfigDraft), first(ConfigDraft), {},
        {"draft": "delay_rules: {default: 3h}", "_keep": "1"},
    ),
    "scheduling_customerimport": Rights(
        VIEWER, EDITOR, NOBODY, NOBODY, first(CustomerImport), first(CustomerImport), {},
        {"file_name": "a.csv", "size": "10"},
    ),
    # What only the product writes.
    **{
        model._meta.label_lower.replace(".", "_"): Rights(VIEWER, NOBODY, NOBODY, NOBODY, first(model), first(model))
        for model in (
            WebhookMessage, Touch, Event, Complaint, FailedTask, BulkAction, Job, TakeOver, DemoOrder, DemoWatermark
        )
    },
    "rpa_tasks_executionnode": Rights(VIEWER, NOBODY, NOBODY, ADMIN, first(ExecutionNode), first(ExecutionNode)),
    # Who may come in, with what, and what the machine does by itself.
    "scheduling_apikey": Rights(
        VIEWER, ADMIN, ADMIN, NOBODY, first(ApiKey), first(ApiKey), {"name": "other"},
        {"name": "new", "scopes": ["events"]},
    ),
    "scheduling_failedlogin": Rights(
        VIEWER, NOBODY, NOBODY, ADMIN, first(FailedLogin, digest="d"), first(FailedLogin, digest="d"),
    ),
    "scheduling_auditentry": Rights(
        ADMIN, NOBODY, NOBODY, NOBODY, first(AuditEntry, actor="spare"), first(AuditEntry, actor="spare")
    ),
    "auth_user": Rights(
        ADMIN, ADMIN, ADMIN, ADMIN, first(User, username="spare"), first(User, username="spare"),
        {"first_name": "S"},
        {"username": "new", "password1": "Kx7-longer-one", "password2": "Kx7-longer-one", "usable_password": "true"},
    ),
    "scheduling_invitation": Rights(
        ADMIN, ADMIN, NOBODY, NOBODY, first(Invitation), first(Invitation),
        added={"name": "bob", "email": "", "role": "viewer"},
    ),
    "auth_group": Rights(
        ADMIN, ADMIN, ADMIN, ADMIN, first(Group, name="spare"), first(Group, name="spare"),
        {"name": "other"}, {"name": "new"},
    ),
    "django_celery_beat_periodictask": Rights(
        ADMIN, ADMIN, ADMIN, ADMIN, first(PeriodicTask, name="p1"), first(PeriodicTask, name="p1"),
        {"name": "other"},
        {"name": "new", "task": "scheduling.dispatch_due",
         "interval": pk_of(IntervalSchedule)},
    ),
    "django_celery_beat_intervalschedule": Rights(
        ADMIN, ADMIN, ADMIN, ADMIN, first(IntervalSchedule),
        created(lambda: IntervalSchedule.objects.create(every=77, period="days")), {"every": "78"}, {"every": "79"},
    ),
    "django_celery_beat_crontabschedule": Rights(
        ADMIN, ADMIN, ADMIN, ADMIN, first(CrontabSchedule),
        created(lambda: CrontabSchedule.objects.create(minute="59")), {"minute": "58"}, {"minute": "57"},
    ),
    "django_celery_beat_clockedschedule": Rights(
        ADMIN, ADMIN, ADMIN, ADMIN, first(ClockedSchedule), first(ClockedSchedule),
        {"clocked_time_0": "2028-01-01", "clocked_time_1": "00:00:00"},
        {"clocked_time_0": "2029-01-01", "clocked_time_1": "00:00:00"},
    ),
}  # fmt: skip

REASON = {"reason": "r"}
PACE = {"reason": "r", "per_second": "5"}

PAGES: dict[str, Page] = {
    # The site itself.
    "index": Page(STAFF),
    "search": Page(STAFF, query="s=node", safe=True),
    "scheduling_touch_workers": Page(VIEWER),
    "app_list": Page(VIEWER, args=lambda user: ("scheduling",), hides=True),
    "autocomplete": Page(VIEWER, query="app_label=rpa_tasks&model_name=job&field_name=shop&term="),
    "view_on_site": Page(NOBODY, args=lambda user: (1, 1), hides=True),
    "password_change": Page(
        STAFF, STAFF,
        data={"old_password": "x", "new_password1": "Kx7-longer-one", "new_password2": "Kx7-longer-one"},
    ),
    "password_change_done": Page(STAFF),
    "account": Page(STAFF),
    "account_second_factor": Page(NOBODY, STAFF, form=False, data={"do": "start"}),
    "account_end_sign_in": Page(NOBODY, STAFF, own_sign_in, form=False),
    "account_end_others": Page(NOBODY, STAFF, lambda user: own_sign_in(user) and (), form=False),
    "invitation_accept": Page(
        ANONYMOUS, ANONYMOUS, open_invitation, form=False,
        data={"username": "fresh", "password1": "Kx7-longer-one", "password2": "Kx7-longer-one"},
    ),
    "scheduling_invitation_withdraw": Page(ADMIN, ADMIN, first(Invitation)),
    "auth_user_reset_second_factor": Page(ADMIN, ADMIN, user_with_second_factor),
    "auth_user_password_change": Page(
        ADMIN, ADMIN, first(User, username="spare"),
        data={"password1": "Kx7-longer-one", "password2": "Kx7-longer-one", "usable_password": "true"},
    ),
    # Keys.
    "scheduling_apikey_revoke": Page(ADMIN, ADMIN, first(ApiKey)),
    # Pauses.
    "scheduling_pause_end": Page(
        OPERATOR, OPERATOR, query="scope=node:guide",
    ),
    "undo_act": Page(NOBODY, OPERATOR, undone_pause, form=False),
    "scheduling_channelconfig_receivers": Page(VIEWER),
    "scheduling_channelconfig_pause_or_resume": Page(OPERATOR, args=first(ChannelConfig)),
    "scheduling_node_pause_or_resume": Page(OPERATOR, args=first(Node)),
    # Retirement.
    **{f"{name}_retire": Page(EDITOR, EDITOR, row) for name, row in RETIRABLE.items()},
    **{
        f"{name}_bring_back": Page(EDITOR, EDITOR, retired(find_model(name)))
        for name in RETIRABLE
    },
    # Alerts and tests.
    "scheduling_webhooksubscription_send_test_message": Page(EDITOR, EDITOR, first(WebhookSubscription, key="crm")),
    "scheduling_webhooksubscription_pause_sending": Page(EDITOR, EDITOR, first(WebhookSubscription, key="crm")),
    "scheduling_webhooksubscription_enable_sending": Page(EDITOR, EDITOR, first(WebhookSubscription, key="rests")),
    "scheduling_webhooksubscription_send_range_again": Page(
        EDITOR, EDITOR, first(WebhookSubscription, key="crm"),
        data={"since_0": "2026-01-01", "since_1": "00:00:00", "until_0": "2027-01-01", "until_1": "00:00:00"},
    ),
    "scheduling_alertreceiver_send_test": Page(EDITOR, EDITOR, first(AlertReceiver)),
    "scheduling_template_send_test": Page(
        EDITOR, EDITOR, first(Template, key="guide"),
        data={"channel": pk_of(ChannelConfig, key="log"), "event_data": "{}"},
    ),
    "scheduling_template_preview": Page(
        EDITOR, EDITOR, form=False, data={"subject": "", "body": "hi {{ user.name }}"}, writes=False,
    ),
    # Failed tasks.
    "scheduling_failedtask_groups": Page(VIEWER),
    "scheduling_failedtask_act": Page(OPERATOR, OPERATOR, open_task("ignore"), data=REASON),
    "scheduling_failedtask_edit": Page(EDITOR, EDITOR, open_task(), data={**REASON, "subject": "", "body": "Hello"}),
    "scheduling_failedtask_assign": Page(NOBODY, OPERATOR, open_task(), form=False, data={"user": "viewer"}),
    "scheduling_failedtask_comment": Page(NOBODY, OPERATOR, open_task(), form=False, data={"text": "note"}),
    "scheduling_failedtask_matching": Page(OPERATOR, OPERATOR, lambda user: ("ignore",), data=PACE),
    "scheduling_failedtask_export": Page(OPERATOR, args=lambda user: ("xlsx",), notes=True),
    "scheduling_bulkaction_cancel": Page(NOBODY, OPERATOR, first(BulkAction), form=False),
    "scheduling_auditentry_export": Page(ADMIN, args=lambda user: ("xlsx",), notes=True),
    # Customers and their imports.
    "scheduling_customer_enable_addresses": Page(EDITOR, EDITOR, disabled_customer),
    "scheduling_customerimport_part": Page(
        NOBODY, EDITOR, created(lambda: store_import("uploading")), query="start=0", form=False,
    ),
    "scheduling_customerimport_start": Page(NOBODY, EDITOR, created(lambda: store_import("ready")), form=False),
    "scheduling_customerimport_stop": Page(NOBODY, EDITOR, created(lambda: store_import("running")), form=False),
    "scheduling_customerimport_refused": Page(EDITOR, args=first(CustomerImport)),
    # Touches.
    "scheduling_touch_matching": Page(OPERATOR, OPERATOR, lambda user: ("cancel",), query="status=waiting", data=PACE),
    "scheduling_touch_export": Page(OPERATOR, args=lambda user: ("xlsx",), notes=True),
    "scheduling_touch_cancel": Page(OPERATOR, OPERATOR, first(Touch, state="scheduled")),
    # Looks at what happens.
    "scheduling_complaint_rates": Page(VIEWER),
    "scheduling_event_preview": Page(VIEWER, query="type=order.paid&user_id=ann&event_data={}"),
    "scheduling_node_matrix": Page(VIEWER),
    "scheduling_node_conversion": Page(VIEWER),
    "scheduling_node_open_waiting": Page(VIEWER, args=first(Node)),
    "scheduling_node_preview": Page(VIEWER, args=first(Node, key="later"), query="user_id=ann"),
    "scheduling_node_place": Page(
        NOBODY, EDITOR, with_values(Node, {"key": "later"}, enabled=True), form=False,
        data={"stage": pk_of(Stage, key="presale"), "enabled": "False", "confirmed": "1"},
    ),
    "scheduling_node_copy": Page(NOBODY, EDITOR, first(Node, key="later"), form=False),
    "chat_sessions_silencepolicy_live": Page(VIEWER),
    "chat_sessions_silencepolicy_chats": Page(VIEWER),
    "chat_sessions_silencepolicy_silences": Page(VIEWER),
    "chat_sessions_silencepolicy_chat": Page(VIEWER, query="session=s-1"),
    # Roll-outs and drafts.
    "scheduling_node_start_rollout": Page(EDITOR, EDITOR, first(Node, key="guide")),
    "scheduling_node_stop_rollout": Page(EDITOR, EDITOR, first(Node, key="rolled")),
    "scheduling_configdraft_publish": Page(EDITOR, EDITOR, first(ConfigDraft), data=REASON),
    "scheduling_configdraft_mine": Page(
        EDITOR, EDITOR, own_draft, form=False, data={"act": "discard", "seen": lambda: drafts.compute_seen(None)}
    ),
    # RPA.
    "rpa_tasks_job_matching": Page(
        OPERATOR, OPERATOR, lambda user: ("job.cancel",), query="state__exact=scheduled", data=PACE
    ),
    "rpa_tasks_job_live": Page(VIEWER),
    "rpa_tasks_job_evidence": Page(VIEWER, args=evidence),
    "rpa_tasks_job_export": Page(OPERATOR, args=lambda user: ("xlsx",), notes=True),
    "rpa_tasks_job_cancel": Page(OPERATOR, OPERATOR, first(Job, state="scheduled")),
    "rpa_tasks_job_again": Page(OPERATOR, OPERATOR, first(Job, state="failed")),
    "rpa_tasks_platform_close_breaker": Page(OPERATOR, OPERATOR, open_breaker),
    "rpa_tasks_platform_pause_row": Page(OPERATOR, OPERATOR, first(Platform)),
    "rpa_tasks_platform_resume_row": Page(OPERATOR, OPERATOR, with_values(Platform, {}, paused=True)),
    "rpa_tasks_shop_live": Page(VIEWER),
    "rpa_tasks_shop_run_now": Page(OPERATOR, args=first(Shop, shop_id="s2")),
    "rpa_tasks_shop_run_now_many": Page(
        OPERATOR, OPERATOR, query=lambda: f"shops={Shop.objects.get(shop_id='s2').pk}",
    ),
    "rpa_tasks_shop_schedules": Page(VIEWER),
    "rpa_tasks_shop_schedule_add": Page(EDITOR, EDITOR, data={"flow": pk_of(Flow)}),
    "rpa_tasks_shop_schedule": Page(EDITOR, EDITOR, first(PeriodicTask, name="p2"), data={"every": "20"}),
    "rpa_tasks_shop_confirm_login": Page(
        OPERATOR, OPERATOR, with_values(Shop, {"shop_id": "s2"}, login_state=LoginState.NEEDED),
    ),
    "rpa_tasks_executionnode_drain": Page(OPERATOR, OPERATOR, first(ExecutionNode)),
    "rpa_tasks_executionnode_resume": Page(
        OPERATOR, OPERATOR, with_values(ExecutionNode, {}, draining_at=now(), drained_by="ann")
    ),
    "rpa_tasks_executionnode_release_shops": Page(OPERATOR, OPERATOR, node_with_shop),
    "rpa_tasks_shop_take_over": Page(OPERATOR, OPERATOR, shop_with_reporting_node, data={"do": "start"}),
    "rpa_tasks_shop_leave_home": Page(OPERATOR, OPERATOR, shop_with_lost_node),
    "rpa_tasks_shop_pause_row": Page(OPERATOR, OPERATOR, first(Shop, shop_id="s2")),
    "rpa_tasks_shop_resume_row": Page(OPERATOR, OPERATOR, with_values(Shop, {"shop_id": "s2"}, paused=True)),
}  # fmt: skip

#: Addresses that answer with files, fragments or words for scripts.
NO_PAGES = {
    "autocomplete", "search", "rpa_tasks_job_evidence", "rpa_tasks_job_export", "scheduling_touch_export",
    "scheduling_failedtask_export", "scheduling_auditentry_export", "scheduling_customerimport_refused",
    "scheduling_template_preview", "chat_sessions_silencepolicy_chats", "rpa_tasks_job_live", "rpa_tasks_shop_live",
    "scheduling_node_preview",
}  # fmt: skip

#: Open on purpose: who comes in, who goes out, words for scripts.
OPEN = {
    "login", "login_code", "login_enrolment", "login_provider", "login_provider_answer", "logout", "jsi18n",
}  # fmt: skip

CONFIRMED = {"confirmed": "1", **REASON}


def unknown_task(user: User) -> tuple[Any, ...]:
    (pk,) = open_task()(user)
    FailedTask.objects.filter(pk=pk).update(failure="unknown")
    return (pk,)


ACTIONS: dict[tuple[str, str], list[Action]] = {
    ("scheduling_touch", "cancel_selected"): [Action(OPERATOR, first(Touch, state="scheduled"))],
    ("rpa_tasks_job", "cancel_selected"): [Action(OPERATOR, first(Job, state="scheduled"))],
    ("rpa_tasks_shop", "run_selected"): [Action(OPERATOR, first(Shop), writes=False)],
    ("rpa_tasks_shop", "release_selected"): [Action(OPERATOR, shop_with_lost_node, {"confirmed": "1"})],
    ("scheduling_failedlogin", "unlock"): [Action(ADMIN, first(FailedLogin, digest="d"))],
    ("scheduling_failedtask", "bulk_retry"): [Action(OPERATOR, open_task(), CONFIRMED)],
    ("scheduling_failedtask", "bulk_again"): [Action(OPERATOR, open_task(), CONFIRMED)],
    ("scheduling_failedtask", "bulk_delivered"): [Action(OPERATOR, unknown_task, CONFIRMED)],
    ("scheduling_failedtask", "bulk_not_delivered"): [Action(OPERATOR, unknown_task, CONFIRMED)],
    ("scheduling_failedtask", "bulk_ignore"): [Action(OPERATOR, open_task(), CONFIRMED)],
    ("scheduling_failedtask", "bulk_archive"): [Action(OPERATOR, open_task(), CONFIRMED)],
    ("django_celery_beat_periodictask", "enable_tasks"): [
        Action(ADMIN, with_values(PeriodicTask, {"name": "p1"}, enabled=False))
    ],
    ("django_celery_beat_periodictask", "disable_tasks"): [Action(ADMIN, first(PeriodicTask, name="p1"))],
    ("django_celery_beat_periodictask", "toggle_tasks"): [Action(ADMIN, first(PeriodicTask, name="p1"))],
    # Sends to the broker and writes no row; who may not is not offered it.
    ("django_celery_beat_periodictask", "run_tasks"): [],
}  # fmt: skip


def page_addresses(
    user: User, *, histories: int = len(MODELS), forms: bool = True, empty_forms: bool = True
) -> Iterator[str]:
    """Yield the address of each page that a browser shows. The row of a page is made when its turn comes.

    `histories` is the number of models whose history is read. `forms` includes the forms of the models,
    and `empty_forms` those for a new row, where a row of the model can be changed too.
    """
    for place, (name, rights) in enumerate(MODELS.items()):
        yield reverse(f"admin:{name}_changelist")
        if not forms:
            continue
        if rights.add != NOBODY and (empty_forms or rights.change == NOBODY):
            yield reverse(f"admin:{name}_add")
        for kind in ("change", "history") if place < histories else ("change",):
            yield reverse(f"admin:{name}_{kind}", args=rights.row(user))
    for name, page in PAGES.items():
        if page.see != NOBODY and name not in NO_PAGES:
            query = page.query() if callable(page.query) else page.query
            address = reverse(f"admin:{name}", args=page.args(user))
            yield f"{address}?{query}" if query else address
