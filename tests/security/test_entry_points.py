"""Every way in is shut to those it is not for: swept over all routes, so that a new one is swept as well."""

import socket
from urllib.parse import urlsplit

import pytest
from django.contrib import admin
from django.contrib.auth.models import User
from django.core.files.uploadedfile import SimpleUploadedFile
from django.test import Client
from django.urls import URLPattern, URLResolver, get_resolver, reverse

from tests.support.tables import each_row
from tests.support.waiting import WAIT_LIMIT

pytestmark = [pytest.mark.django_db, pytest.mark.usefixtures("static_root")]

#: What a POST may do without having been on a page of ours: the signed token of a mail is the proof (RFC 8058), or the
#: signature or the secret address of a vendor, or the secret of a chat system.
WITHOUT_CSRF = {"unsubscribe", "vendor_callback", "vendor_report", "chat_hook"}


@pytest.fixture
def root():
    return User.objects.create_superuser("root", password="right")


def named_views(resolver=None, names=()):
    for each in (resolver or get_resolver()).url_patterns:
        if isinstance(each, URLResolver):
            yield from named_views(each, (*names, *filter(None, [each.namespace])))
        elif isinstance(each, URLPattern):
            yield ":".join([*names, each.name or ""]), each.callback


def test_forms_require_csrf_token(root):
    client = Client(enforce_csrf_checks=True)
    client.force_login(root)
    for model in admin.site._registry:
        url = reverse(f"admin:{model._meta.app_label}_{model._meta.model_name}_changelist")
        assert client.post(url, {"action": "delete_selected"}).status_code == 403, url
    for name in ("admin:login", "admin:logout", "set_language", "demo_chat_start"):
        assert client.post(reverse(name)).status_code == 403, name
    exempt = {
        name for name, view in named_views() if getattr(view, "csrf_exempt", False) and not name.startswith("api")
    }
    assert exempt <= WITHOUT_CSRF, exempt


@each_row("there", ["https://evil.example/", "//evil.example", "/\\evil.example", "javascript:alert(1)"])
def test_next_address_of_other_site_is_ignored(root, there):
    def led(answer):
        return str(urlsplit(answer["Location"]).netloc) + answer["Location"][:11].partition("javascript")[1]

    login = {"username": "root", "password": "right", "next": there}
    assert led(Client().post(reverse("admin:login"), login)) == ""
    assert led(Client().post(f"{reverse('admin:login')}?next={there}", login)) == ""
    assert led(Client().post(reverse("set_language"), {"language": "en", "next": there})) == ""


def test_uploaded_file_is_not_stored(client, settings, tmp_path):
    settings.FILE_UPLOAD_TEMP_DIR = str(tmp_path)
    settings.FILE_UPLOAD_MAX_MEMORY_SIZE = 1
    sent = {"username": "x", "password": "y", "file": SimpleUploadedFile("x.bin", b"0" * 300_000)}
    answer = client.post(reverse("admin:login"), sent)
    assert answer.status_code == 200
    assert not answer.wsgi_request.FILES
    assert list(tmp_path.iterdir()) == []


def test_request_body_without_limit_is_refused(server):
    """The file would be on the web node's disk before any authentication."""
    there = urlsplit(server)
    for header, status in (("Content-Length: 10000000000", b"413"), ("Transfer-Encoding: chunked", b"411")):
        with socket.create_connection((there.hostname, there.port), timeout=WAIT_LIMIT) as connected:
            connected.sendall(f"POST /admin/login/ HTTP/1.1\r\nHost: localhost\r\n{header}\r\n\r\n".encode())
            assert status in connected.recv(1000).split(b"\r\n")[0]
