"""CSV imports of customers by an API client: parts, check, decision, refused lines."""

from __future__ import annotations

from typing import Any

import pytest
import requests

from scheduling.models import Customer, CustomerImport
from tests.scheduling.api.serving import Client
from tests.scheduling.imports.conftest import finish, make_lines, read_names
from tests.support.waiting import WAIT_LIMIT

pytestmark = pytest.mark.django_db(transaction=True)


def put_part(api: Client, import_id: str, start: int, content: bytes) -> requests.Response:
    headers = {"Authorization": f"Bearer {api.key}", "Content-Type": "text/csv"}
    url = f"{api.address}/api/v1/customer-imports/{import_id}/parts/{start}"
    return requests.put(url, content, headers=headers, timeout=WAIT_LIMIT)


def upload(api: Client, content: bytes, part: int = 10_000, **options: Any) -> str:
    """Send a file as a client does, each part twice."""
    made = api("POST", "/customer-imports", {"file_name": "people.csv", "size": len(content), **options})
    assert made.status_code == 201, made.text
    import_id: str = made.json()["id"]
    for start in range(0, len(content), part):
        for _repeat in range(2):
            answer = put_part(api, import_id, start, content[start : start + part])
            assert answer.status_code == 200, answer.text
    return import_id


def run_batches(import_id: str) -> None:
    finish(CustomerImport.objects.get(pk=import_id))


def test_file_is_uploaded_checked_and_imported(api: Client) -> None:
    Customer.objects.create(user_id="user-1", name="李雷")
    lines = make_lines(1_200).splitlines()
    lines[7] = "user-6,x,vip,too many"
    lines[900] = "1.38E+10,x,vip"
    import_id = upload(api, "\r\n".join(lines).encode("gb18030"))
    path = f"/customer-imports/{import_id}"
    assert api.get(path).json()["state"] == "checking"
    assert api("POST", f"{path}/start").status_code == 409

    run_batches(import_id)
    checked = api.get(path).json()
    assert (checked["state"], checked["counts"]["checking"]["refused"]) == ("ready", 2)
    refused = api.get(f"{path}/refused?limit=1").json()
    rest = api.get(f"{path}/refused?limit=1&cursor={refused['next']}").json()
    assert [each["line"] for each in [*refused["items"], *rest["items"]]] == [8, 901]
    assert rest["next"] is None
    assert Customer.objects.count() == 1

    assert api("POST", f"{path}/start").json()["state"] == "running"
    run_batches(import_id)
    assert api.get(path).json()["counts"]["running"] == {
        "lines": 1200, "created": 1197, "changed": 1, "unchanged": 0, "refused": 2,
    }  # fmt: skip
    assert read_names()["user-1"] == "客户1"


def test_wrong_announcement_names_each_field(api: Client) -> None:
    for body, field in (
        ({"file_name": "a", "size": 0}, "size"), ({"file_name": "a", "size": 300_000_000}, "size"),
        ({"file_name": "a", "size": 9, "encoding": "utf-16"}, "encoding"), ({"size": 9}, "file_name"),
    ):  # fmt: skip
        answer = api("POST", "/customer-imports", body)
        assert answer.status_code == 422
        assert [each["field"] for each in answer.json()["errors"]] == [field]
    assert not CustomerImport.objects.exists()


def test_part_out_of_order_names_the_next_one(api: Client) -> None:
    import_id = api("POST", "/customer-imports", {"file_name": "a", "size": 100}).json()["id"]
    assert put_part(api, import_id, 0, b"x" * 40).status_code == 200
    assert "byte 40" in put_part(api, import_id, 60, b"x" * 40).text
    assert put_part(api, import_id, 40, b"x" * 61).status_code == 422
    assert put_part(api, import_id, 40, b"").status_code == 422
    assert api.get(f"/customer-imports/{import_id}").json()["stored"] == 40
    assert api("POST", f"/customer-imports/{import_id}/stop").json()["state"] == "discarded"
    assert api.get("/customer-imports/0199c1f2-6f0c-7d5e-8a53-1d2f0b8b7c11").status_code == 404
