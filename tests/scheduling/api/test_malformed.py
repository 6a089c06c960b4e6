"""Whatever cannot be meant is refused with the field that is wrong, and nothing is stored."""

from __future__ import annotations

import gzip
import json
import socket
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from typing import Any
from urllib.parse import urlsplit

import pytest

from scheduling.models import ApiKey, Customer, Event, EventType
from scheduling.operations import commands
from tests.scheduling.api.serving import PATIENCE, Client, told

MANY = "application/cloudevents-batch+json"
MEGABYTE = 1_048_576


@pytest.fixture(scope="module")
def api(server: str, django_db_blocker: Any) -> Iterator[Client]:
    """One key for all of them: nothing is stored, so there is nothing to empty in between."""
    with django_db_blocker.unblock():
        yield Client(server, commands.create_api_key("careless", ["events"]))
        ApiKey.objects.all().delete()


@pytest.fixture(autouse=True)
def _nothing_is_stored(api: Client) -> Iterator[None]:
    yield
    for model in (Event, Customer, EventType):
        assert not model.objects.exists()


def problem(answer: Any) -> dict[str, Any]:
    """Every refusal is a problem."""
    assert 400 <= answer.status_code < 500, answer.text
    assert answer.headers["Content-Type"] == "application/problem+json"
    found: dict[str, Any] = answer.json()
    assert found["status"] == answer.status_code
    assert {"type", "title", "detail", "errors"} <= found.keys()
    return found


def fields(answer: Any) -> list[str]:
    assert answer.status_code == 422
    return [error["field"] for error in problem(answer)["errors"]]


@pytest.mark.parametrize("name", ["id", "source", "type", "subject", "specversion"])
@pytest.mark.parametrize("value", [..., None, "", "  ", 7, ["x"], {"x": 1}, True])
def test_a_required_attribute_is_missing_or_wrong(api: Client, name: str, value: Any) -> None:
    assert fields(api.event(told(**{name: value}))) == [name]


@pytest.mark.parametrize(("name", "length"), [("id", 255), ("source", 255), ("type", 120), ("subject", 200)])
def test_an_attribute_is_too_long(api: Client, name: str, length: int) -> None:
    assert fields(api.event(told(**{name: "字" * (length + 1)}))) == [name]


@pytest.mark.parametrize("name", ["id", "source", "type", "subject"])
@pytest.mark.parametrize("text", ["a\x01b", "a\x85b", "a\nb", "a\ufffeb"])
def test_an_attribute_has_a_control_character(api: Client, name: str, text: str) -> None:
    assert fields(api.event(told(**{name: text}))) == [name]


@pytest.mark.parametrize("version", ["0.3", "1", "1.1", 1.0])
def test_another_version(api: Client, version: Any) -> None:
    assert fields(api.event(told(specversion=version))) == ["specversion"]


@pytest.mark.parametrize(
    "at",
    [
        "2026-03-01T08:00:00", "2026-03-01", "yesterday", "", 1_700_000_000, "20260301T080000Z", "2026-02-30T08:00:00Z",
        "2026-03-01T08:00:00+24:01", "0001-01-01T00:00:00+14:00", "1969-12-31T23:59:59Z", "2026-W09-7T08:00:00Z",
        "٢٠٢٦-03-01T08:00:00Z",
    ],
)  # fmt: skip
def test_a_time_that_is_none(api: Client, at: Any) -> None:
    assert fields(api.event(told(time=at))) == ["time"]


def test_a_time_to_come(api: Client) -> None:
    later = datetime.now(UTC) + timedelta(minutes=6)
    assert fields(api.event(told(time=later.isoformat()))) == ["time"]


@pytest.mark.parametrize("data", ["text", 1, [], True, [{"chat_id": "c1"}]])
def test_data_that_is_no_object(api: Client, data: Any) -> None:
    assert fields(api.event(told(data=data))) == ["data"]


@pytest.mark.parametrize("chat_id", [7, ["c1"], "c" * 201, "c\x00"])
def test_a_chat_id_that_is_none(api: Client, chat_id: Any) -> None:
    assert fields(api.event(told(data={"chat_id": chat_id}))) == ["data.chat_id"]


@pytest.mark.parametrize(
    ("extra", "field"),
    [
        ({"data_base64": "AAAA"}, "data_base64"),
        ({"datacontenttype": "text/xml"}, "datacontenttype"),
        ({"userId": "ann"}, "userId"),
        ({"extra": {"a": 1}}, "extra"),
        ({"extra": [1]}, "extra"),
        ({"extra": 1.5}, "extra"),
    ],
)
def test_an_attribute_that_cannot_be_one(api: Client, extra: dict[str, Any], field: str) -> None:
    assert fields(api.event(told(**extra))) == [field]


def spelled(data: str) -> bytes:
    return json.dumps(told(data="DATA")).replace('"DATA"', data).encode()


@pytest.mark.parametrize(
    ("data", "field"),
    [
        ('{"n": NaN}', "data.n"),
        ('{"n": -Infinity}', "data.n"),
        ('{"n": 1e999}', "data.n"),
        ('{"n": 18446744073709551616}', "data.n"),
        ('{"n": -9223372036854775809}', "data.n"),
        ('{"n": ' + "9" * 100_000 + "}", "data.n"),
        ('{"list": ["ok", "a\\u0000b"]}', "data.list[1]"),
        ('{"half": "\\ud83d"}', "data.half"),
        ('{"half": "\\udc00\\ud800"}', "data.half"),
        ('{"a\\u0000": 1}', "data.a\x00"),
        ('{"a": 1, "a": 2}', "data.a"),
        ('{"b": {"x": 1, "x": 1}}', "data.b.x"),
        ("[" * 40 + "]" * 40, "data" + "[0]" * 31),
    ],
)
def test_json_that_breaks_later(api: Client, data: str, field: str) -> None:
    assert fields(api.raw(spelled(data))) == [field]


def test_a_member_given_twice_at_the_top(api: Client) -> None:
    body = json.dumps(told())[:-1] + ', "id": "e2"}'
    assert fields(api.raw(body.encode())) == ["id"]


@pytest.mark.parametrize(
    "body",
    [
        b"", b"{", b"nonsense", b'{"a": 1} x', b"\xff\xfe{\x00}\x00", '{"a": "中"}'.encode("gbk"), b"[" * 100_000,
        b'{"a":' * 100_000, b'\xef\xbb\xbf{"a": 1}', b'{"a": "\xed\xa0\x80"}', b'{"a": "line\nbreak"}', b'{"a": 01}',
        b"{'a': 1}", b'{"a": "\x00"}',
    ],
)  # fmt: skip
@pytest.mark.parametrize("content_type", ["application/json", MANY])
def test_what_is_no_json(api: Client, body: bytes, content_type: str) -> None:
    assert problem(api.raw(body, content_type))["status"] == 400


@pytest.mark.parametrize("body", [b"[]", b'"text"', b"7", b"null", b"[{}]"])
def test_one_event_that_is_no_object(api: Client, body: bytes) -> None:
    assert fields(api.raw(body)) == [""]


@pytest.mark.parametrize("body", [b"[]", b"{}", b"null"])
def test_a_batch_of_nothing(api: Client, body: bytes) -> None:
    assert fields(api.raw(body, MANY)) == [""]


def test_one_that_does_not_fit_refuses_its_batch(api: Client) -> None:
    answer = api.event(told("e0"), told("e1"), told("e2"), told(...), "no event", told("e5", time="never"))  # type: ignore[arg-type]
    assert fields(answer) == ["[3].id", "[4]", "[5].time"]


def test_a_batch_names_the_place_of_what_cannot_be_stored(api: Client) -> None:
    assert fields(api.event(told("e0"), told("e1", data={"n": [{"x": "\0"}]}))) == ["[1].data.n[0].x"]


def test_a_batch_that_is_too_long(api: Client) -> None:
    assert problem(api.event(*(told(f"e{number}") for number in range(501))))["status"] == 413


def test_a_thousand_errors_are_not_all_listed(api: Client) -> None:
    assert len(fields(api.event(*({} for _ in range(500))))) == 100


@pytest.mark.parametrize("content_type", ["text/plain", "application/xml", "", "multipart/form-data; boundary=x"])
def test_another_content_type(api: Client, content_type: str) -> None:
    assert problem(api.raw(json.dumps(told()).encode(), content_type))["status"] == 415


@pytest.mark.parametrize("charset", ["gbk", "utf-16", "latin-1", "nonsense"])
def test_another_charset(api: Client, charset: str) -> None:
    content_type = f"application/cloudevents+json; charset={charset}"
    assert problem(api.raw(json.dumps(told()).encode(), content_type))["status"] == 415


def test_a_compressed_body(api: Client) -> None:
    bomb = gzip.compress(b"[" + b" " * 50_000_000 + b"]")
    answer = api.raw(bomb, **{"Content-Encoding": "gzip"})
    assert problem(answer)["status"] == 415


BINARY = {f"ce-{name}": value for name, value in told(data=...).items()}


@pytest.mark.parametrize(
    ("headers", "field"),
    [
        ({"ce-id": ""}, "id"),
        ({"ce-id": "%00"}, "id"),
        ({"ce-id": "%ff"}, "id"),
        ({"ce-subject": b"\xff\xfe"}, "subject"),
        ({"ce-time": "today"}, "time"),
        ({"ce-data": "x"}, "data"),
        ({"ce-specversion": "0.3"}, "specversion"),
        ({"ce-source": "x" * 256}, "source"),
    ],
)
def test_a_binary_header_that_does_not_fit(api: Client, headers: dict[str, Any], field: str) -> None:
    assert fields(api("POST", "/events", {}, headers=BINARY | headers)) == [field]


def test_binary_data_is_held_to_the_same(api: Client) -> None:
    assert fields(api.raw(b'{"n": NaN}', "application/json", **BINARY)) == ["data.n"]
    assert fields(api.raw(b"[1]", "application/json", **BINARY)) == ["data"]
    assert problem(api.raw(b"<x/>", "text/xml", **BINARY))["status"] == 415


# --- as bytes on the wire --------------------------------------------------------------------------------------------


def speak(address: str, *parts: bytes) -> bytes:
    """Send this and read what is answered, until the server ends the connection or has answered."""
    parsed = urlsplit(address)
    with socket.create_connection((parsed.hostname, parsed.port), PATIENCE) as wire:
        try:
            for part in parts:
                wire.sendall(part)
        except (BrokenPipeError, ConnectionResetError):
            pass
        answer = b""
        while b"}" not in answer:
            if not (more := wire.recv(65536)):
                break
            answer += more
        return answer


def head(api: Client, *lines: str) -> bytes:
    usual = ["POST /api/v1/events HTTP/1.1", "Host: x", f"Authorization: Bearer {api.key}",
             "Content-Type: application/cloudevents+json"]  # fmt: skip
    return "\r\n".join([*usual, *lines, "", ""]).encode()


def test_a_body_announced_as_too_long_is_not_read(api: Client) -> None:
    answer = speak(api.address, head(api, f"Content-Length: {MEGABYTE + 1}"))
    assert answer.startswith(b"HTTP/1.1 413")
    assert b"application/problem+json" in answer


def test_a_body_without_length_is_read_no_further_than_the_limit(api: Client) -> None:
    chunk = b"10000\r\n" + b" " * 65536 + b"\r\n"
    answer = speak(api.address, head(api, "Transfer-Encoding: chunked"), *([chunk] * 17))
    assert answer.startswith(b"HTTP/1.1 413")
    assert b"onnection: close" in answer


def test_a_header_given_twice(api: Client) -> None:
    names = [f"ce-{name}: {value}" for name, value in told(data=...).items()]
    request = head(api, *names, "ce-id: e2", "Content-Length: 2").replace(b"cloudevents+json", b"json") + b"{}"
    answer = speak(api.address, request)
    assert answer.startswith(b"HTTP/1.1 422")
    assert b'"field": "id"' in answer


def test_a_header_of_megabytes(api: Client) -> None:
    answer = speak(api.address, head(api, f"ce-id: {'x' * 5_000_000}", "Content-Length: 0"))
    assert answer == b"" or answer.split()[1] in (b"400", b"413", b"431")
