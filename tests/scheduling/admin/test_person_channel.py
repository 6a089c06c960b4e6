"""Channels to one person in the back office: the form, its errors, a test message."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from django.test import Client
from pytest_django import Settings

from scheduling.channels.vendors.base import shared_tokens
from scheduling.models import ChannelConfig, Customer
from tests.scheduling.admin.conftest import CheckFormErrors, FillForm, SaveForm, Url
from tests.scheduling.core.receivers import ScriptedReceiver
from tests.support.matrix import MatrixBuilder
from tests.support.tables import each_row

pytestmark = pytest.mark.django_db

DECLARED = """
address: phone
query: {access_token: "{{ channel.token }}"}
body: {to: "{{ message.address }}", text: "{{ message.body }}"}
token: {url: "https://api.vendor.example.com/token", body: {secret: "{{ channel.secret }}"}}
success: {field: code, op: eq, value: 0}
code_field: code
errors:
  - {code: [1, 2], then: retry, after: 1m}
quotas: [1/1m]
"""


@pytest.fixture
def vendor(settings: Settings) -> Iterator[ScriptedReceiver]:
    settings.AFTERTOUCH_ALLOWED_PRIVATE_HOSTS = ["127.0.0.1"]
    shared_tokens.cache_clear()
    with ScriptedReceiver() as receiver:
        yield receiver
    shared_tokens.cache_clear()


def test_declared_channel_is_saved_by_the_form_and_hides_its_secret(
    editor: Client, admin_url: Url, save_form: SaveForm
) -> None:
    url = admin_url("channelconfig_add")
    save_form(
        url, key="texts", kind="http", settings=DECLARED, secret_url="https://api.vendor.example.com/send",
        secret_secret="a-long-vendor-secret",
    )  # fmt: skip

    row = ChannelConfig.objects.get(key="texts")
    assert row.config["token"]["body"] == {"secret": "{{ channel.secret }}"}
    assert row.config["errors"] == [{"code": [1, 2], "then": "retry", "after": "1m"}]
    page = editor.get(admin_url("channelconfig_change", row.pk)).content.decode()
    assert "a-long-vendor-secret" not in page
    assert "https://api.vendor.example.com/send" not in page
    assert "{{ channel.token }}" in page
    save_form(admin_url("channelconfig_change", row.pk))
    row.refresh_from_db()
    assert (row.version, row.config["secret"]) == (1, "a-long-vendor-secret")


@each_row("place", ["url", "token"])
def test_declared_channel_form_keeps_no_secret_for_another_host(
    editor: Client, admin_url: Url, fill_form: FillForm, place: str
) -> None:
    url = admin_url("channelconfig_add")
    address = "https://api.vendor.example.com/send"
    form = fill_form(url, key="texts", kind="http", settings=DECLARED, secret_url=address, secret_secret="one")
    assert editor.post(url, form).status_code == 302
    row = ChannelConfig.objects.get(key="texts")
    page = admin_url("channelconfig_change", row.pk)
    evil = DECLARED.replace("api.vendor", "evil")
    change = {"secret_url": "https://evil.example.com/send"} if place == "url" else {"settings": evil}
    refused = editor.post(page, fill_form(page, **change))
    assert refused.context["adminform"].form.errors == {"secret_secret": ["Enter the secret again for another host."]}
    assert editor.post(page, fill_form(page, secret_url=f"{address}/v2")).status_code == 302
    assert editor.post(page, fill_form(page, **change, secret_secret="two")).status_code == 302
    row.refresh_from_db()
    assert row.config["secret"] == "two"


def test_declared_channel_form_errors_name_the_setting(check_form_errors: CheckFormErrors, admin_url: Url) -> None:
    form = {"key": "texts", "kind": "http", "secret_url": "https://api.vendor.example.com/send"}
    check_form_errors(
        admin_url("channelconfig_add"),
        *(
            (form | {"settings": DECLARED.replace(before, after)}, "settings", f">{error}")
            for before, after, error in (
                ("then: retry", "then: perhaps", "errors.0.then: must be one of permanent, retry"),
                ("{{ message.body }}", "{{ user.name }}", "body.text: line 1: unknown variable “user”"),
                ("1/1m", "many", "quotas: “many” is not like 20/1m"),
                ("https://api.vendor.example.com/token", "https://10.0.0.1/", "token.url: "),
            )
        ),
    )
    assert not ChannelConfig.objects.exists()


@each_row(
    "kind, config, address, body, shown",
    [
        ("wecom_app", {"corp_id": "ww1", "agent_id": 7}, {"wecom_app": "ann"}, "hi {{ user.name }}", "[Test] hi ann"),
        (
            "wechat_official", {"app_id": "wx1", "template_id": "T"}, {"wechat_official": "o1"},
            "thing1: {{ user.name }}", "thing1: ann",
        ),
    ],
)  # fmt: skip
def test_template_test_reaches_one_person(
    matrix: MatrixBuilder, editor: Client, admin_url: Url, vendor: ScriptedReceiver,
    kind: str, config: dict[str, Any], address: dict[str, str], body: str, shown: str,
) -> None:  # fmt: skip
    vendor.script = [{"errcode": 0, "access_token": "token-of-the-vendor", "expires_in": 7200}, {"errcode": 43101}]
    config = config | {"secret": "a-long-vendor-secret", "url": vendor.url.removesuffix("/hook")}
    channel = ChannelConfig.objects.create(key="person", kind=kind, config=config)
    Customer.objects.create(user_id="ann", addresses=address)
    template = matrix.template("guide", body=body)

    page = editor.post(admin_url("template_send_test", template.pk), {"channel": channel.pk, "user_id": "ann"})

    assert page.context["body"] == shown
    assert page.context["result"]["title"] == "Not delivered"
    assert "43101" in page.context["result"]["text"]
    assert "token-of-the-vendor" not in page.content.decode()
