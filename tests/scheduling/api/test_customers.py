"""What the business tells about its customers."""

from __future__ import annotations

from typing import Any

import pytest

from scheduling.models import Customer
from tests.scheduling.api.serving import Client, run_concurrently

pytestmark = pytest.mark.django_db(transaction=True)

ANN = {
    "level": "vip",
    "name": "安 👩‍💻",
    "locale": "zh-hans",
    "timezone": "Asia/Shanghai",
    "opted_out": False,
    "addresses": {"email": "ann@example.com", "inapp": "ann"},
}


def test_put_customer_creates_and_returns_it(api: Client) -> None:
    made = api("PUT", "/customers/ann", ANN)
    assert made.status_code == 200
    assert made.json() == ANN | {"user_id": "ann", "opted_out_at": None, "last_active_at": None}
    assert api.get("/customers/ann").json() == made.json()


def test_put_customer_keeps_unnamed_fields(api: Client) -> None:
    api("PUT", "/customers/ann", ANN)
    changed = api("PUT", "/customers/ann", {"level": "normal"}).json()
    assert (changed["level"], changed["name"], changed["addresses"]) == ("normal", ANN["name"], ANN["addresses"])


def test_opt_out_stores_time_and_can_be_reverted(api: Client) -> None:
    first = api("PUT", "/customers/ann", {"opted_out": True}).json()
    assert first["opted_out_at"]
    assert api("PUT", "/customers/ann", {"opted_out": True}).json()["opted_out_at"] == first["opted_out_at"]
    assert api("PUT", "/customers/ann", {"opted_out": False}).json()["opted_out_at"] is None


@pytest.mark.parametrize("user_id", ["a/b", "用户", "a b", "%2F", "?", "a.b@c", "//x"])
def test_user_id_with_any_characters_has_a_path(api: Client, user_id: str) -> None:
    from urllib.parse import quote

    path = f"/customers/{quote(user_id, safe='')}"
    assert api("PUT", path, {"name": "x"}).status_code == 200
    assert Customer.objects.get().user_id == user_id
    assert api.get(path).json()["user_id"] == user_id


@pytest.mark.parametrize(
    ("body", "field"),
    [
        ({"nickname": "x"}, "nickname"),
        ({"level": None}, "level"),
        ({"level": 7}, "level"),
        ({"level": "x" * 41}, "level"),
        ({"name": "a\u0000"}, "name"),
        ({"name": "a\nb"}, "name"),
        ({"timezone": "Shanghai"}, "timezone"),
        ({"timezone": "../../etc/passwd"}, "timezone"),
        ({"timezone": "/etc/localtime"}, "timezone"),
        ({"opted_out": "yes"}, "opted_out"),
        ({"opted_out": 1}, "opted_out"),
        ({"addresses": []}, "addresses"),
        ({"addresses": {"email": 7}}, "addresses.email"),
        ({"addresses": {"email": "nobody"}}, "addresses.email"),
        ({"addresses": {"email": "a@b.example\nBcc: c@d.example"}}, "addresses.email"),
        ({"addresses": {"inapp": ""}}, "addresses.inapp"),
        ({"addresses": {f"k{number}": "x" for number in range(21)}}, "addresses"),
    ],
)
def test_put_customer_errors_name_the_field(api: Client, body: dict[str, Any], field: str) -> None:
    answer = api("PUT", "/customers/ann", body)
    assert (answer.status_code, [error["field"] for error in answer.json()["errors"]]) == (422, [field])
    assert not Customer.objects.exists()


@pytest.mark.parametrize(
    "body", [b"", b"{", b'{"name": NaN}', b'{"name": "\\ud800"}', b"[]", b'{"name":"a","name":"b"}']
)
def test_put_customer_malformed_body_is_refused(api: Client, body: bytes) -> None:
    answer = api("PUT", "/customers/ann", data=body, headers={"Content-Type": "application/json"})
    assert answer.status_code in (400, 422)
    assert not Customer.objects.exists()


def test_put_customer_long_user_id_is_refused(api: Client) -> None:
    answer = api("PUT", f"/customers/{'x' * 201}", {})
    assert (answer.status_code, answer.json()["errors"][0]["field"]) == (422, "user_id")


def test_get_unknown_customer_is_not_found(api: Client) -> None:
    assert api.get("/customers/nobody").status_code == 404


def test_concurrent_puts_are_merged(api: Client) -> None:
    facts = [{"level": "vip"}, {"name": "Ann"}, {"locale": "en"}, {"timezone": "UTC"}]
    answers = run_concurrently(4, lambda number: api("PUT", "/customers/ann", facts[number]))
    assert [answer.status_code for answer in answers] == [200] * 4
    told = api.get("/customers/ann").json()
    assert [told[name] for name in ("level", "name", "locale", "timezone")] == ["vip", "Ann", "en", "UTC"]
