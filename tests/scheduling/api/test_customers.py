"""Customers that the business reports."""

import pytest

from scheduling.models import Customer, CustomerChange, CustomerProfile
from tests.scheduling.api.serving import cloud_event
from tests.support.second_connection import run_concurrently
from tests.support.tables import each_row

pytestmark = pytest.mark.django_db(transaction=True)

ANN = {
    "level": "vip",
    "name": "安 👩‍💻",
    "locale": "zh-hans",
    "timezone": "Asia/Shanghai",
    "opted_out": False,
    "addresses": {"email": "ann@example.com", "inapp": "ann"},
}
AGREED = {"given_at": "2026-03-03T12:00:00Z", "source": "shop"}


def test_put_customer_creates_and_returns_it(api):
    made = api("PUT", "/customers/ann", ANN)
    assert made.status_code == 200
    assert made.json() == ANN | {
        "user_id": "ann",
        "opted_out_at": None,
        "objected_at": None,
        "consent": None,
        "last_active_at": None,
        "attributes": {},
        "tags": [],
        "ignored": [],
    }
    assert api.get("/customers/ann").json() | {"ignored": []} == made.json()
    changed = api("PUT", "/customers/ann", {"level": "normal"}).json()  # what is not named stays
    assert (changed["level"], changed["name"], changed["addresses"]) == ("normal", ANN["name"], ANN["addresses"])
    answer = api("PUT", f"/customers/{'x' * 201}", {})
    assert (answer.status_code, answer.json()["errors"][0]["field"]) == (422, "user_id")
    assert api.get("/customers/nobody").status_code == 404


def test_put_customer_merges_addresses_and_null_removes_one(api):
    api("PUT", "/customers/ann", ANN)
    assert api("PUT", "/customers/ann", {"addresses": {"inapp": "x"}}).json()["addresses"] == {
        "email": "ann@example.com", "inapp": "x",
    }  # fmt: skip
    api("POST", "/customers", {"customers": [{"user_id": "ann", "addresses": {"phone": "13800138000", "inapp": None}}]})
    assert api.get("/customers/ann").json()["addresses"] == {"email": "ann@example.com", "phone": "13800138000"}
    assert api("PUT", "/customers/ann", {"addresses": {"email": None, "phone": None}}).json()["addresses"] == {}


def test_opt_out_stores_time_and_can_be_reverted(api):
    first = api("PUT", "/customers/ann", {"opted_out": True}).json()
    assert first["opted_out_at"]
    assert api("PUT", "/customers/ann", {"opted_out": True}).json()["opted_out_at"] == first["opted_out_at"]
    assert api("PUT", "/customers/ann", {"opted_out": False}).json()["opted_out_at"] is None


@each_row("user_id", ["a/b", "用户", "a b", "%2F", "?", "a.b@c", "//x"])
def test_user_id_with_any_characters_has_a_path(api, user_id):
    from urllib.parse import quote

    path = f"/customers/{quote(user_id, safe='')}"
    assert api("PUT", path, {"name": "x"}).status_code == 200
    assert Customer.objects.filter(user_id=user_id).exists()
    assert api.get(path).json()["user_id"] == user_id


@each_row(
    "body, field",
    [
        ({"nickname": "x"}, "nickname"),
        ({"last_active_at": "2020-01-01T00:00:00Z"}, "last_active_at"),
        ({"id": 7}, "id"),
        ({"level": 7}, "level"),
        ({"level": "x" * 41}, "level"),
        ({"name": "a\u0000"}, "name"),
        ({"timezone": "../../etc/passwd"}, "timezone"),
        ({"timezone": "posix/UTC"}, "timezone"),
        ({"opted_out": 1}, "opted_out"),
        ({"consent": AGREED}, "consent"),
        ({"opted_out": True, "consent": AGREED}, "consent"),
        ({"opted_out": False, "consent": {"source": "shop"}}, "consent.given_at"),
        ({"opted_out": False, "consent": AGREED | {"given_at": "2026-03-03"}}, "consent.given_at"),
        ({"opted_out": False, "consent": AGREED | {"given_at": "2126-03-03T12:00:00Z"}}, "consent.given_at"),
        ({"opted_out": False, "consent": AGREED | {"source": ""}}, "consent.source"),
        ({"addresses": {"email": 7}}, "addresses.email"),
        ({"addresses": {"email": "nobody"}}, "addresses.email"),
        ({"addresses": {"email": "ann@example.com\u202c"}}, "addresses.email"),  # as some programs copy it
        ({"addresses": {"email": "a@b.example\nBcc: c@d.example"}}, "addresses.email"),
        ({"addresses": {"inapp": ""}}, "addresses.inapp"),
        ({"addresses": {f"k{number}": "x" for number in range(21)}}, "addresses"),
        ({"attributes": {"city": "x" * 257}}, "attributes.city"),
        ({"attributes": {"city": ["a"]}}, "attributes.city"),
        ({"attributes": {"born": "2026-02-30T00:00:00Z"}}, "attributes.born"),
        *(
            ({"attributes": {name: 1}}, f"attributes.{name}.[key]")
            for name in ("a b", "1a", "_a", "a.b", "a-b", "x" * 65)
        ),
        ({"tags": ["x" * 65]}, "tags"),
        ({"tags": [" a"]}, "tags"),
        ({"tags": [str(number) for number in range(51)]}, "tags"),
        ({"tags": [7]}, "tags.0"),
    ],
)
def test_put_customer_errors_name_the_field(api, body, field):
    answer = api("PUT", "/customers/ann", body)
    assert (answer.status_code, [error["field"] for error in answer.json()["errors"]]) == (422, [field])
    assert not Customer.objects.exists()


def test_concurrent_puts_are_merged(api):
    facts = [{"level": "vip"}, {"name": "Ann"}, {"locale": "en"}, {"timezone": "UTC"}]
    answers = run_concurrently(4, lambda number: api("PUT", "/customers/ann", facts[number]))
    assert [answer.status_code for answer in answers] == [200] * 4
    told = api.get("/customers/ann").json()
    assert [told[name] for name in ("level", "name", "locale", "timezone")] == ["vip", "Ann", "en", "UTC"]


# --- attributes and tags ----------------------------------------------------------------------------------------------


def test_put_customer_merges_attributes_and_replaces_tags(api):
    given = {"city": "上海", "orders": 3, "paid": 12.5, "member": True, "since": "2026-03-03T20:00:00+08:00"}
    api("PUT", "/customers/ann", {"attributes": given, "tags": ["vip", "new", "vip"]})
    api("PUT", "/customers/ann", {"attributes": {"member": 1}})
    told = api("PUT", "/customers/ann", {"attributes": {"city": "杭州", "orders": None, "member": True}}).json()
    assert told["attributes"] == {"city": "杭州", "paid": 12.5, "member": True, "since": "2026-03-03T12:00:00Z"}
    assert told["attributes"]["member"] is True  # it is another value than 1
    assert told["tags"] == ["new", "vip"]
    assert api("PUT", "/customers/ann", {"tags": []}).json()["tags"] == []


def test_put_customer_changes_are_stored_with_their_author(api):
    api("PUT", "/customers/ann", {"name": "安", "attributes": {"city": "上海"}})
    api("PUT", "/customers/ann", {"name": "安", "attributes": {"city": "杭州"}, "tags": ["vip"]})
    api("PUT", "/customers/ann", {"name": "安", "tags": ["vip"]})
    found = CustomerChange.objects.order_by("id").values_list("actor", "created", "before", "after")
    assert list(found) == [
        ("api:shop", True, {"name": "", "attributes": {"city": None}}, {"name": "安", "attributes": {"city": "上海"}}),
        (
            "api:shop", False, {"attributes": {"city": "上海"}, "tags": []},
            {"attributes": {"city": "杭州"}, "tags": ["vip"]},
        ),
    ]  # fmt: skip


def test_post_customers_answers_each_row(api):
    api("PUT", "/customers/ann", {"level": "vip"})
    rows = [
        {"user_id": "ann", "level": "vip"}, {"user_id": "bob", "tags": ["a"]}, {"user_id": "eve"},
    ]  # fmt: skip
    answer = api("POST", "/customers", {"customers": rows})
    assert answer.json() == {
        "customers": [
            {"user_id": "ann", "created": False, "changed": [], "ignored": []},
            {"user_id": "bob", "created": True, "changed": ["tags"], "ignored": []},
            {"user_id": "eve", "created": True, "changed": [], "ignored": []},
        ]
    }
    assert api.get("/customers/bob").json()["tags"] == ["a"]


@each_row(
    "second, field",
    [
        ({"user_id": "bob", "attributes": {"x": []}}, "customers.1.attributes.x"),
        ({"user_id": "ann"}, "customers.0.user_id"),
        ({"level": "vip"}, "customers.1.user_id"),
        ({"user_id": "bob", "addresses": {"email": "x"}}, "customers.1.addresses.email"),
        ({"user_id": "bob", "attributes": {"new": 1}}, "customers.1.attributes"),
    ],
)
def test_post_customers_with_an_error_stores_nothing(api, second, field):
    api("PUT", "/customers/bob", {"attributes": {f"k{number}": 1 for number in range(50)}})
    answer = api("POST", "/customers", {"customers": [{"user_id": "ann"}, second]})
    assert (answer.status_code, answer.json()["errors"][0]["field"]) == (422, field)
    assert not Customer.objects.filter(user_id="ann").exists()


@each_row("count", [0, 501])
def test_post_customers_outside_the_limits_is_refused(api, count):
    answer = api("POST", "/customers", {"customers": [{"user_id": f"u{number}"} for number in range(count)]})
    assert (answer.status_code, answer.json()["errors"][0]["field"]) == (422, "customers")


def test_list_customers_finds_parts_of_names_ids_and_tags(api):
    names = {"u1": "欧阳小明", "u2": "王小明", "u3": "Ann Lee", "u4": "100% 王", "x5": ""}
    rows = [{"user_id": user_id, "name": name, "tags": ["vip"]} for user_id, name in names.items()]
    api("POST", "/customers", {"customers": rows})
    api("PUT", "/customers/u1", {"tags": []})

    def found(**params):
        return [each["user_id"] for each in api.get("/customers", **params).json()["items"]]

    assert found(q="小明") == ["u2", "u1"]
    assert found(q="王") == ["u4", "u2"]
    assert found(q="阳小") == ["u1"]
    assert found(q="LEE") == ["u3"]
    assert found(q="% 王") == ["u4"]
    assert found(q="u") == ["u4", "u3", "u2", "u1"]
    assert found(q="小明", tag="vip") == ["u2"]
    assert found(q="张") == found(tag="none") == []
    first = api.get("/customers", limit=3).json()
    rest = api.get("/customers", limit=3, cursor=first["next"]).json()
    assert [each["user_id"] for each in first["items"] + rest["items"]] == ["x5", "u4", "u3", "u2", "u1"]
    assert rest["next"] is None


def test_concurrent_batches_in_opposite_orders_all_succeed(api):
    users = [f"u{number}" for number in range(60)]
    api("POST", "/customers", {"customers": [{"user_id": user} for user in users[::2]]})

    def put(number):
        rows = [{"user_id": user, "attributes": {f"by{number}": number}} for user in users[:: -1 if number % 2 else 1]]
        return api("POST", "/customers", {"customers": rows}).status_code

    assert run_concurrently(6, put) == [200] * 6
    wanted = {f"by{number}": number for number in range(6)}
    assert list(CustomerProfile.objects.values_list("attributes", flat=True)) == [wanted] * len(users)


def test_put_beside_an_event_that_creates_the_customer_keeps_both(api):
    def act(number):
        user = f"u{number // 2}"
        if number % 2:
            return api("PUT", f"/customers/{user}", {"tags": ["vip"]}).status_code
        return api.event(cloud_event(id=user, subject=user)).status_code

    answers = run_concurrently(16, act)
    assert answers == [202, 200] * 8
    assert Customer.objects.filter(last_active_at__isnull=False, profile__tags=["vip"]).count() == 8
