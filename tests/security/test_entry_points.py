"""Every way in is shut to those it is not for: swept over all routes, so that a new one is swept as well."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit
from uuid import uuid4

import pytest
import requests
from django.contrib import admin
from django.contrib.auth.models import Group, User
from django.core.files.uploadedfile import SimpleUploadedFile
from django.db import connection
from django.test import Client
from django.urls import URLPattern, URLResolver, get_resolver, reverse
from pytest_django import Settings

from scheduling.management.commands.bootstrap import Command
from scheduling.models import ApiKey, Customer
from scheduling.operations.commands import create_api_key
from tests.scheduling.api.serving import WAIT_LIMIT
from tests.security.test_admin_rights import count_writes
from tests.security.test_api_scopes import OPERATIONS, list_other_scopes
from tests.support.matrix import MatrixBuilder, RecordEvent

pytestmark = pytest.mark.django_db(transaction=True)

#: What a POST may do without having been on a page of ours: the signed token of a mail is the proof (RFC 8058), or the
#: signature or the secret address of a vendor, or the secret of a chat system.
WITHOUT_CSRF = {"unsubscribe", "vendor_callback", "vendor_report", "chat_hook"}
BULK_SCOPES = ("failed-tasks", "rpa.operate")


@pytest.fixture(autouse=True)
def static_root(settings: Settings, tmp_path: Path) -> None:
    settings.STATIC_ROOT = tmp_path


@pytest.fixture
def root() -> User:
    return User.objects.create_superuser("root", password="right")


@pytest.fixture
def web(server: str, transactional_db: None) -> str:
    return server


def test_each_api_request_requires_one_scope(web: str) -> None:
    """Before anything is read: the body is not JSON, and the ids are those of nothing."""

    def ask(name: str, *scopes: str) -> int:
        method, path = name.replace("{", "").replace("}", "").split()
        headers = {"Authorization": f"Bearer {create_api_key(str(uuid4()), scopes)}"} if scopes else {}
        return requests.request(
            method, f"{web}/api/v1{path}", data="{", headers=headers, timeout=WAIT_LIMIT
        ).status_code

    for name, operation in OPERATIONS.items():
        # A bulk action belongs to a list, and the scope of that list counts.
        needed = BULK_SCOPES if "/bulk-actions/" in name else (operation.scope,)
        assert ask(name) == 401, name
        assert ask(name, *list_other_scopes(*needed)) == 403, name
        for scope in needed:
            assert ask(name, scope) not in (401, 403), name


def routes(resolver: Any = None, prefix: str = "", names: tuple[str, ...] = ()) -> Iterator[tuple[str, str, Any]]:
    for each in (resolver or get_resolver()).url_patterns:
        if isinstance(each, URLResolver):
            yield from routes(each, prefix + str(each.pattern), (*names, *filter(None, [each.namespace])))
        elif isinstance(each, URLPattern):
            yield prefix + str(each.pattern), ":".join([*names, each.name or ""]), each.callback


def test_forms_require_csrf_token(root: User) -> None:
    client = Client(enforce_csrf_checks=True)
    client.force_login(root)
    for model in admin.site._registry:
        url = reverse(f"admin:{model._meta.app_label}_{model._meta.model_name}_changelist")
        assert client.post(url, {"action": "delete_selected"}).status_code == 403, url
    for name in ("admin:login", "admin:logout", "set_language", "demo_chat_start"):
        assert client.post(reverse(name)).status_code == 403, name
    exempt = {name for _, name, view in routes() if getattr(view, "csrf_exempt", False) and not name.startswith("api")}
    assert exempt <= WITHOUT_CSRF, exempt


def dump() -> dict[str, list[str]]:
    """Return all rows, without logins and without the log entries of exports, which are downloads."""
    found: dict[str, list[str]] = {}
    with connection.cursor() as cursor:
        cursor.execute("SELECT tablename FROM pg_tables WHERE schemaname = 'public'")
        for (table,) in cursor.fetchall():
            if table not in ("django_session", "auth_user", "django_admin_log"):
                chosen = " WHERE action <> 'exported'" if table == "scheduling_auditentry" else ""
                cursor.execute(f'SELECT each::text FROM "{table}" AS each{chosen} ORDER BY 1')
                found[table] = [text for (text,) in cursor.fetchall()]
    return found


def test_admin_get_requests_change_no_row(root: User, matrix: MatrixBuilder, record_event: RecordEvent) -> None:
    """GET each URL of the back office that takes a row, with a row.

    Mail scanners, browsers that prefetch, and recipients of a link follow such links.
    """
    from scheduling.models import Pause
    from tests.scheduling.core.conftest import deliver

    matrix.node("guide")
    matrix.node("broken", trigger="order.paid", template=matrix.template("broken", body="{{ event.data.order_no }}"))
    deliver(record_event(chat_id="c1").task_ids)
    deliver(record_event("order.paid").task_ids)
    record_event("material.downloaded", "bob")
    create_api_key("shop", ["events"])
    Pause.objects.create(scope="node:guide")
    client = Client()
    client.force_login(root)
    before, written, seen = dump(), count_writes(), 0
    known = list(routes())
    for model in admin.site._registry:
        row = model._default_manager.first()
        for route, name, _view in known:
            if not name.startswith(f"admin:{model._meta.app_label}_{model._meta.model_name}_"):
                continue
            if ("<" in route and row is None) or "(" in route:
                continue
            names = [part.split(">")[0].rpartition(":")[2] for part in route.split("<")[1:]]
            if names and names not in (["object_id"], ["pk"], ["id"]):
                continue
            answer = client.get(reverse(name, kwargs=dict.fromkeys(names, row and row.pk)))
            assert answer.status_code in (200, 302, 400, 403, 404, 405), (name, answer.status_code)
            seen += 1
            if (now_written := count_writes()) != written:  # else no row has changed
                written = now_written
                assert dump() == before, name
    assert seen > 50
    assert dump() == before, "another connection wrote"


@pytest.mark.parametrize("there", ["https://evil.example/", "//evil.example", "/\\evil.example", "javascript:alert(1)"])
def test_next_address_of_other_site_is_ignored(root: User, there: str) -> None:
    def led(answer: Any) -> str:
        return str(urlsplit(answer["Location"]).netloc) + answer["Location"][:11].partition("javascript")[1]

    login = {"username": "root", "password": "right", "next": there}
    assert led(Client().post(reverse("admin:login"), login)) == ""
    assert led(Client().post(f"{reverse('admin:login')}?next={there}", login)) == ""
    assert led(Client().post(reverse("set_language"), {"language": "en", "next": there})) == ""


def test_editor_cannot_extend_own_rights(client: Client) -> None:
    """What a form does not show it does not take."""
    Command().grant_permissions()
    editor = User.objects.create_user("editor", is_staff=True)
    editor.groups.add(Group.objects.get(name="editor"))
    client.force_login(editor)
    mine = reverse("admin:auth_user_change", args=[editor.pk])
    assert client.post(mine, {"username": "editor", "is_superuser": "on"}).status_code == 403
    assert client.post(reverse("admin:auth_user_add"), {"username": "twin"}).status_code == 403
    assert client.post(reverse("admin:scheduling_apikey_add"), {"name": "x", "scopes": "events"}).status_code == 403
    editor.refresh_from_db()
    assert not editor.is_superuser
    assert not ApiKey.objects.exists()


def test_customer_request_with_hidden_field_is_refused(client: Client) -> None:
    key = create_api_key("shop", ["customers"])
    for hidden in ("id", "pk", "last_active_at", "conversation_at", "inactive_since", "created_at", "user_id"):
        answer = client.put(
            "/api/v1/customers/ann", {"name": "Ann", hidden: "2020-01-01T00:00:00Z"}, "application/json",
            headers={"authorization": f"Bearer {key}"},
        )  # fmt: skip
        assert answer.status_code in (400, 422), hidden
    assert not Customer.objects.exists()


def test_uploaded_file_is_not_stored(client: Client, settings: Settings, tmp_path: Path) -> None:
    settings.FILE_UPLOAD_TEMP_DIR = str(tmp_path)
    settings.FILE_UPLOAD_MAX_MEMORY_SIZE = 1
    sent = {"username": "x", "password": "y", "file": SimpleUploadedFile("x.bin", b"0" * 300_000)}
    answer = client.post(reverse("admin:login"), sent)
    assert answer.status_code == 200
    assert not answer.wsgi_request.FILES
    assert list(tmp_path.iterdir()) == []


def test_request_body_without_limit_is_refused(web: str) -> None:
    """The file would be on the web node's disk before any authentication."""
    there = urlsplit(web)
    for header, status in (("Content-Length: 10000000000", b"413"), ("Transfer-Encoding: chunked", b"411")):
        with socket.create_connection((there.hostname, there.port), timeout=WAIT_LIMIT) as connected:
            connected.sendall(f"POST /admin/login/ HTTP/1.1\r\nHost: localhost\r\n{header}\r\n\r\n".encode())
            assert status in connected.recv(1000).split(b"\r\n")[0]
