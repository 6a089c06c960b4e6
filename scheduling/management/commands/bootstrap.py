"""Create what a new deployment needs: `manage.py bootstrap`. Idempotent."""

from __future__ import annotations

import secrets
from pathlib import Path
from typing import Any

from django.conf import settings
from django.contrib.auth import get_user_model
from django.contrib.auth.models import Group, Permission
from django.core.management import call_command
from django.core.management.base import BaseCommand, CommandParser
from django.db import connection, transaction

from scheduling.app_integrations import integrations
from scheduling.configuration.file import apply
from scheduling.configuration.file.section import Stamp
from scheduling.management.commands.export_config import replace_file
from scheduling.models import EventType, Node

SHIPPED = Path(__file__).resolve().parent.parent.parent / "shipped.yaml"
DEMO_USER = "demo"
LOCK = 4_163_071  #: of the advisory lock: concurrent starts run one after another

#: Type, name, and whether the customer causes it.
EVENT_TYPES = (
    ("consultation.ended", "咨询结束", True),
    ("material.downloaded", "资料下载", True),
    ("signup.succeeded", "注册成功", True),
    ("order.paid", "订单支付", True),
    ("service.completed", "服务完成", True),
    ("conversation.started", "会话开始", True),
    ("complaint.received", "收到投诉", True),
    ("customer.inactive", "客户沉寂", False),
    ("session.silent", "会话沉默", False),
    ("session.unanswered", "客服未回复", False),
    ("touch.delivered", "触达已送达", False),
    ("touch.failed", "触达失败", False),
    ("touch.suppressed", "触达被拦截", False),
    ("touch.cancelled", "触达已取消", False),
    ("touch.unknown", "触达结果不明", False),
    ("touch.read", "触达已读", True),
    ("touch.clicked", "触达链接已点击", True),
    ("touch.replied", "触达已回复", True),
    ("touch.bounced", "触达被退回", False),
)

APPS = ("scheduling", "rpa_tasks", "chat_sessions")
OPERATOR = (
    "act_on_failedtask", "add_pause", "change_pause", "delete_pause", "change_touch", "run_job", "cancel_job",
    "take_over_shop",
)  # fmt: skip
EDITED = (
    "stage", "template", "templatetext", "node", "channelconfig", "community", "delayrule", "harassmentrule",
    "calendar", "holdout", "eventtype", "customer", "platform", "flow", "shop", "silencepolicy", "campaign",
    "alertreceiver", "webhooksubscription",
)  # fmt: skip


class Command(BaseCommand):
    help = "Create event types, the default matrix and groups, and for a demo a login. Idempotent."

    def add_arguments(self, parser: CommandParser) -> None:
        parser.add_argument("--migrate", action="store_true", help="apply migrations first")

    def handle(self, migrate: bool = False, **options: Any) -> None:
        if migrate:
            call_command("migrate", verbosity=0)
        self.create_defaults()

    @transaction.atomic
    def create_defaults(self) -> None:
        with connection.cursor() as cursor:
            cursor.execute("SELECT pg_advisory_xact_lock(%s)", [LOCK])
        self.describe_event_types()
        self.ship_matrix()
        for create in [create for app in integrations() for create in app.bootstrap]:
            if line := create():
                self.stdout.write(line)
        self.grant_permissions()
        if settings.AFTERTOUCH_DEMO:
            self.stdout.write(f"Demo login: {DEMO_USER} / {create_demo_login()}")

    def describe_event_types(self) -> None:
        """Name the known event types. A received event may have added a type without a name."""
        described = set(EventType.objects.exclude(name="").values_list("key", flat=True))
        for key, name, is_activity in EVENT_TYPES:
            # No UPDATE of existing rows, not even an empty one: each makes every process reload its matrix.
            if key not in described:
                EventType.objects.update_or_create(key=key, defaults={"name": name, "is_activity": is_activity})

    def ship_matrix(self) -> None:
        if Node.objects.exists():
            return
        shipped = apply.parse_document(SHIPPED.read_bytes())
        added = apply.store_document(shipped, Stamp("shipped"), apply.ChangePlan.without_existing)
        self.stdout.write(f"Shipped matrix: {len(added.of('nodes'))} nodes")

    def grant_permissions(self) -> None:
        """Add permissions to the shipped groups. Removes none: fewer permissions need a group of their own."""
        ours = Permission.objects.filter(content_type__app_label__in=APPS)
        viewer = list(ours.filter(codename__startswith="view_").exclude(codename="view_auditentry"))
        operator = viewer + find_permissions(OPERATOR)
        editor = operator + find_permissions(
            [f"{verb}_{model}" for verb in ("add", "change", "delete") for model in EDITED]
        )
        editor += find_permissions(["change_job"])  # a job with another payload than the stored one
        editor += find_permissions(["add_configdraft", "publish_configdraft", "add_customerimport"])
        # Members can run programs on execution nodes.
        commander = viewer + find_permissions(
            [*(f"{verb}_flow" for verb in ("add", "change", "delete")), "define_command"]
        )
        for name, permissions in (
            ("viewer", viewer), ("operator", operator), ("editor", editor), ("command editor", commander)
        ):  # fmt: skip
            group, _ = Group.objects.get_or_create(name=name)
            group.permissions.add(*permissions)


def find_permissions(codenames: Any) -> list[Permission]:
    found = {each.codename: each for each in Permission.objects.filter(content_type__app_label__in=APPS)}
    return [found[codename] for codename in codenames]


def create_demo_login() -> str:
    """Return the demo user's password. Create it once, in a private file of the state directory."""
    file = Path(settings.AFTERTOUCH_STATE_DIR) / "demo-password"
    user = get_user_model().objects.filter(username=DEMO_USER).first()
    password = file.read_text().strip() if file.exists() else ""
    if user is not None and password:
        return password if user.check_password(password) else "(the password was changed)"
    if not password:
        password = secrets.token_urlsafe(12)
        file.parent.mkdir(parents=True, exist_ok=True)
        replace_file(file, f"{password}\n", private=True)
    if user is None:
        get_user_model().objects.create_superuser(DEMO_USER, password=password)
    else:
        user.set_password(password)
        user.save()
    return password
