"""What is personal or secret is not shown in the back office, whatever page; the rows keep it."""

import json
from datetime import timedelta

import pytest
from django.urls import reverse

from scheduling.models import Attempt, Event, FailedTask, Touch
from scheduling.operations import commands
from scheduling.redaction import HIDDEN, redact, redact_text
from tests.scheduling.core.conftest import deliver
from tests.support.tables import each_row

NUMBER, SECRET = "13812345678", "s3cr3t-value-9"


# --- what is hidden -----------------------------------------------------------------------------------------------


@each_row(
    "name, value, shown",
    [
        ("phone", NUMBER, "138****5678"), ("mobile_no", NUMBER, "138****5678"),
        ("customerPhone", NUMBER, "138****5678"),
        ("tel", "0571-88886666", "057****6666"), ("PHONE", 13812345678, "138****5678"), ("tel", "110", HIDDEN),
        ("收货手机", NUMBER, "138****5678"), ("id_card", "11010519491231002X", "110****002X"),
        ("idCard", "11010519491231002X", "110****002X"), ("password", SECRET, HIDDEN), ("token", SECRET, HIDDEN),
        ("access-token", SECRET, HIDDEN), ("apiKey", SECRET, HIDDEN), ("APIKey", SECRET, HIDDEN),
        ("key", SECRET, HIDDEN),
        ("Authorization", "Bearer abc", HIDDEN), ("client_secret", SECRET, HIDDEN), ("密码", SECRET, HIDDEN),
        ("phones", [NUMBER, "13900001111"], ["138****5678", "139****1111"]),
        ("token", {"value": SECRET, "ok": True}, {"value": HIDDEN, "ok": True}),
        ("token", {NUMBER: SECRET}, {"138****5678": HIDDEN}), ("by", {NUMBER: 1}, {"138****5678": 1}),
    ],
)  # fmt: skip
def test_redact_hides_values_by_name(name, value, shown):
    assert redact({"a": [{name: value}]}) == {"a": [{name: shown}]}


@each_row(
    "data",
    [
        {"order_no": "20260504138", "amount": 13.5, "paid": True, "note": None, "phone": "", "token": None},
        {"dedupe_key": "k1", "delivery_key": "k2", "idempotencyKey": "k3", "keyboard": "k4", "hotel": "Hilton"},
        {"at": "2026-05-04T13:45:00+08:00", "ms": 1777880000000, "monkey": "m", "tokenizer": "t"},
        {"id": "01a1faba-57e4-7116-bb1d-13812345678f", "trace": "0af7651916cd43dd13812345678c8031"},
    ],
)
def test_redact_keeps_other_values(data):
    assert redact(data) == data
    assert redact_text(json.dumps(data, ensure_ascii=False)) == json.dumps(data, ensure_ascii=False).replace(
        '"token": null', f'"token": {HIDDEN}'
    )


@each_row(
    "text, shown",
    [
        (f"请致电{NUMBER}，谢谢", "请致电138****5678，谢谢"), (f"+86 {NUMBER}", "+86 138****5678"),
        ("138-1234-5678 or 139 0000 1111", "138****5678 or 139****1111"), ("11010519491231002X", "110****002X"),
        (f"GET /send?key={SECRET}&x=1", f"GET /send?key={HIDDEN}&x=1"),
        (f"access_token={SECRET}", f"access_token={HIDDEN}"),
        (f'{{"password": "{SECRET}", "a": 1}}', f'{{"password": "{HIDDEN}", "a": 1}}'),
        (f"authorization: Bearer {SECRET}", f"authorization: Bearer {HIDDEN}"),
        (f"token: {SECRET}", f"token: {HIDDEN}"),
        ("密码：hunter", f"密码：{HIDDEN}"), ("登录密码：abc123，谢谢", f"登录密码：{HIDDEN}，谢谢"),
        ("密码: hunter", f"密码: {HIDDEN}"), ("密码：必须更长", "密码：必须更长"),
        ("got eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiIxIn0.dBjftJeZ4CVP-mB92K27", f"got {HIDDEN}"),
        ("card 4111 1111 1111 1111 ok", f"card 4111{HIDDEN}1111 ok"), ("6222020000000000007", "6222020000000000007"),
        ("card 5555-5555-5555-4444", f"card 5555{HIDDEN}4444"), ("order 4111111111111112", "order 4111111111111112"),
        ("致电１３８１２３４５６７８", f"致电138{HIDDEN}5678"), ("１３８12345678", f"138{HIDDEN}5678"),
        ("redis://:hush@h:1/2", f"redis://:{HIDDEN}@h:1/2"), ("postgres://u:p@ss@h/x", f"postgres://u:{HIDDEN}@h/x"),
        ("https://example.com:8443/a@b", "https://example.com:8443/a@b"),
        ("password: must be longer", "password: must be longer"), ("the key is missing", "the key is missing"),
        ("HTTP 503 after 13 s, order 138123456789", "HTTP 503 after 13 s, order 138123456789"),
    ],
)  # fmt: skip
def test_redact_text_hides_values_within_text(text, shown):
    assert redact_text(text) == shown


@each_row(
    "text",
    [
        "a" * 200_000, "key" * 70_000, "1" * 200_000, "token=" * 40_000, "key: " * 40_000, "密码：" * 60_000,
        "eyJ" * 70_000, "eyJaaaaa." * 25_000, "4 " * 100_000, "4111111111111111 " * 12_000, "a://" * 50_000,
        "a:" * 100_000, "http://u:" + "p" * 200_000, "１" * 200_000, "密码:" * 60_000,
    ],
)  # fmt: skip
def test_redact_text_is_fast_for_long_input(text):
    """A pattern that backtracked at each letter would take minutes."""
    assert redact_text(text)


# --- where it is hidden -------------------------------------------------------------------------------------------

pytestmark = pytest.mark.django_db(transaction=True)
DATA = {"phone": NUMBER, "api_token": SECRET, "note": f"call {NUMBER}", "order_no": "A-77"}


@pytest.fixture
def touch(matrix, record_event):
    """A failed touch with the number in the text and in the receiver's response."""
    matrix.node(template=matrix.template("guide", body="{{ event.data.phone }} {{ event.data.missing }}"))
    matrix.node("later", delay=timedelta(days=1), template=matrix.template("later", body="{{ event.data.note }}"))
    task_ids = record_event(user="ann", data=DATA).task_ids
    touch = Touch.objects.get(pk__in=task_ids, node__key="guide")
    deliver([touch.pk])
    detail = f"bad number {NUMBER}, token={SECRET}"
    attempt = Attempt(1, 1, touch.planned_at, touch.planned_at, "permanent", "http_400", detail, body=f"Dear {NUMBER}")
    Touch.objects.filter(pk=touch.pk).update(attempts=[attempt])
    FailedTask.objects.filter(task_id=touch.pk).update(
        detail=f"bad number {NUMBER}, token={SECRET}", attempts=[{"number": 1, "detail": f"{NUMBER} token={SECRET}"}]
    )
    return touch


def pages_of(touch):
    row = FailedTask.objects.get(task_id=touch.pk)
    commands.update_customer("ann", {"addresses": {"phone": NUMBER, "push_token": SECRET}})

    def url(name, *args):
        return reverse(f"admin:scheduling_{name}", args=args)

    asked = f"?type=material.downloaded&user_id=bob&event_data={json.dumps({**DATA, 'missing': 1})}"
    return {
        "event": url("event_change", touch.event_id), "touch": url("touch_change", touch.pk),
        "failed task": url("failedtask_change", row.pk), "failed tasks": url("failedtask_changelist"),
        "by cause": url("failedtask_groups"),
        "customer": url("customer_change", touch.customer_id), "export": url("failedtask_export", "csv"),
        "overview": reverse("admin:index"), "what would happen": url("event_preview") + asked,
    }  # fmt: skip


def test_pages_and_exports_redact_personal_data_and_secrets(touch, operator):
    for name, url in pages_of(touch).items():
        answer = operator.get(url)
        page = b"".join(answer) if answer.streaming else answer.content
        shown = page.decode()
        if name == "what would happen":
            shown = shown[shown.rindex("</form>") :]  # the form contains the typed text
        assert answer.status_code == 200, name
        assert NUMBER not in shown, name
        assert SECRET not in shown, name
        assert "138****5678" in shown, name
    # The rows keep their values.
    assert Event.objects.get(pk=touch.event_id).data == DATA
    assert FailedTask.objects.get(task_id=touch.pk).payload["event"]["data"] == DATA


def test_customer_form_of_editor_shows_addresses(touch, editor):
    """They could not be edited otherwise."""
    assert NUMBER in editor.get(pages_of(touch)["customer"]).content.decode()
