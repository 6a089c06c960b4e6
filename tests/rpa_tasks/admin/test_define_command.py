"""The right to define commands is separate from editing the rest of a flow."""

from __future__ import annotations

from typing import Any

import pytest
from django.contrib.auth.models import Group, Permission
from django.core.management import call_command
from django.test import Client
from django.urls import reverse

from rpa_tasks.models import Flow, Platform

pytestmark = pytest.mark.django_db


@pytest.fixture
def flow() -> Flow:
    platform = Platform.objects.create(key="pdd")
    return Flow.objects.create(platform=platform, task_type="sync_order", command=["true", "{param}"])


@pytest.fixture
def client_of_group(django_user_model: Any) -> Any:
    def client_of_group(group: str) -> Client:
        call_command("bootstrap")
        user = django_user_model.objects.create_user(f"of {group}", password="x", is_staff=True)
        user.groups.add(Group.objects.get(name=group))
        client = Client()
        client.force_login(user)
        return client

    return client_of_group


def form(flow: Flow, **changes: Any) -> dict[str, Any]:
    """Valid data of the whole form."""
    return {
        "platform": flow.platform_id, "task_type": flow.task_type, "command": "/bin/sh\n{param}", "timeout": "77s",
        "exit_codes": "business=3", "retry_delays": "30s", "payload_schema": "{}", "environment": "DATABASE_URL",
        "path": "/opt/tools", "dedupe_by": "payload", "param_style": "flat", "idempotent": "True",
        "dedupe_window": "", "dedupe_rerun": "after_failure",
        "needs_browser": "on", "version": flow.version, "change_reason": "",
    } | changes  # fmt: skip


def test_editor_cannot_change_flow_command(client_of_group: Any, flow: Flow) -> None:
    editor = client_of_group("editor")
    answer = editor.post(reverse("admin:rpa_tasks_flow_change", args=[flow.pk]), form(flow))
    flow.refresh_from_db()
    assert answer.status_code == 302, answer.content.decode()
    assert flow.timeout.total_seconds() == 77
    assert (flow.command, flow.path, flow.environment, flow.exit_codes) == (["true", "{param}"], [], [], {})
    assert editor.post(reverse("admin:rpa_tasks_flow_add"), form(flow, task_type="another")).status_code == 403
    assert Flow.objects.count() == 1


def test_command_editor_defines_commands(client_of_group: Any, flow: Flow) -> None:
    commander = client_of_group("command editor")
    assert commander.post(reverse("admin:rpa_tasks_flow_change", args=[flow.pk]), form(flow)).status_code == 302
    assert commander.post(reverse("admin:rpa_tasks_flow_add"), form(flow, task_type="another")).status_code == 302
    flow.refresh_from_db()
    assert (flow.command, flow.path) == (["/bin/sh", "{param}"], ["/opt/tools"])
    assert flow.environment == ["DATABASE_URL"]
    assert Flow.objects.get(task_type="another").exit_codes == {"business": [3]}


def test_define_command_without_model_rights_is_refused(client_of_group: Any, flow: Flow) -> None:
    client = client_of_group("viewer")
    Group.objects.get(name="viewer").permissions.add(Permission.objects.get(codename="define_command"))
    answer = client.post(reverse("admin:rpa_tasks_flow_change", args=[flow.pk]), form(flow))
    assert answer.status_code == 403
