"""Whatever cannot be meant is refused with the field that is wrong, and nothing is stored."""

import gzip
import json
import socket
from datetime import UTC, datetime, timedelta
from urllib.parse import urlsplit

import pytest

from scheduling.models import ApiKey, Customer, Event, EventType
from scheduling.operations import commands
from tests.scheduling.api.serving import Client, cloud_event
from tests.support.tables import each_row
from tests.support.waiting import WAIT_LIMIT

MANY = "application/cloudevents-batch+json"
MEGABYTE = 1_048_576


@pytest.fixture(scope="module")
def api(server, django_db_blocker):
    """One key for all of them: nothing is stored, so there is nothing to empty in between."""
    with django_db_blocker.unblock():
        yield Client(server, commands.create_api_key("careless", ["events"]))
        ApiKey.objects.all().delete()


@pytest.fixture(autouse=True)
def _nothing_is_stored(api):
    yield
    for model in (Event, Customer, EventType):
        assert not model.objects.exists()


def problem(answer):
    """Every refusal is a problem."""
    assert 400 <= answer.status_code < 500, answer.text
    assert answer.headers["Content-Type"] == "application/problem+json"
    found = answer.json()
    assert found["status"] == answer.status_code
    assert {"type", "title", "detail", "errors"} <= found.keys()
    return found


def fields(answer):
    assert answer.status_code == 422
    return [error["field"] for error in problem(answer)["errors"]]


@each_row(
    "changes, field",
    [
        *(
            ({name: value}, name)
            for name in ("id", "source", "type", "subject", "specversion")
            for value in (..., None, "", "  ", 7, ["x"], {"x": 1}, True)
        ),
        *(
            ({name: "字" * (most + 1)}, name)
            for name, most in (("id", 255), ("source", 255), ("type", 120), ("subject", 200))
        ),
        *(
            ({name: text}, name)
            for name in ("id", "source", "type", "subject")
            for text in ("a\x01b", "a\x85b", "a\nb", "a\ufffeb")
        ),
        *(({"time": at}, "time") for at in (
            "2026-03-01T08:00:00", "2026-03-01", "yesterday", "", 1_700_000_000, "20260301T080000Z",
            "2026-02-30T08:00:00Z", "2026-03-01T08:00:00+24:01", "0001-01-01T00:00:00+14:00", "1969-12-31T23:59:59Z",
            "2026-W09-7T08:00:00Z", "٢٠٢٦-03-01T08:00:00Z", "2999-01-01T00:00:00Z",
        )),
        ({"data": "text"}, "data"),
        ({"data": []}, "data"),
        ({"data": [{"chat_id": "c1"}]}, "data"),
        ({"data": {"chat_id": 7}}, "data.chat_id"),
        ({"data": {"chat_id": "c" * 201}}, "data.chat_id"),
        ({"data": {"chat_id": "c\x00"}}, "data.chat_id"),
        ({"data": None, "data_base64": "AAAA"}, "data_base64"),
        ({"data": None, "data_base64": "no Base64"}, "data_base64"),
        ({"data": None, "data_base64": 7}, "data_base64"),
        ({"data": None, "data_base64": "WzFd"}, "data_base64"),
        ({"data": None, "data_base64": "eyJhIjogTmFOfQ=="}, "data_base64"),
        ({"data": {}, "data_base64": "e30="}, "data_base64"),
        ({"datacontenttype": "text/xml"}, "datacontenttype"),
        ({"userId": "ann"}, "userId"),
        ({"specversion": "0.3"}, "specversion"),
        ({"specversion": "1.1"}, "specversion"),
        ({"specversion": 1.0}, "specversion"),
        ({"extra": {"a": 1}}, "extra"),
        ({"extra": [1]}, "extra"),
        ({"extra": 1.5}, "extra"),
    ],
)  # fmt: skip
def test_wrong_attribute_is_refused_by_its_name(api, changes, field):
    assert fields(api.event(cloud_event(**changes))) == [field]


def test_future_time_is_refused(api):
    later = datetime.now(UTC) + timedelta(minutes=6)
    assert fields(api.event(cloud_event(time=later.isoformat()))) == ["time"]


def encode_event(data):
    return json.dumps(cloud_event(data="DATA")).replace('"DATA"', data).encode()


@each_row(
    "data, field",
    [
        ('{"n": NaN}', "data.n"),
        ('{"n": -Infinity}', "data.n"),
        ('{"n": 1e999}', "data.n"),
        ('{"n": 18446744073709551616}', "data.n"),
        ('{"n": -9223372036854775809}', "data.n"),
        ('{"n": ' + "9" * 100_000 + "}", "data.n"),
        ('{"list": ["ok", "a\\u0000b"]}', "data.list.1"),
        ('{"half": "\\ud83d"}', "data.half"),
        ('{"half": "\\udc00\\ud800"}', "data.half"),
        ('{"a\\u0000": 1}', "data.a\x00"),
        ('{"a": 1, "a": 2}', "data.a"),
        ('{"b": {"x": 1, "x": 1}}', "data.b.x"),
        ("[" * 40 + "]" * 40, "data" + ".0" * 31),
    ],
)
def test_unstorable_json_is_refused_with_its_path(api, data, field):
    assert fields(api.raw(encode_event(data))) == [field]


@each_row(
    "body",
    [
        b"", b"{", b"nonsense", b'{"a": 1} x', b"\xff\xfe{\x00}\x00", '{"a": "中"}'.encode("gbk"), b"[" * 100_000,
        b'{"a":' * 100_000, b'\xef\xbb\xbf{"a": 1}', b'{"a": "\xed\xa0\x80"}', b'{"a": "line\nbreak"}', b'{"a": 01}',
        b"{'a': 1}", b'{"a": "\x00"}',
    ],
)  # fmt: skip
@each_row("content_type", ["application/json", MANY])
def test_body_not_json_is_refused(api, body, content_type):
    assert problem(api.raw(body, content_type))["status"] == 400


@each_row("body", [b"[]", b'"text"', b"7", b"null", b"[{}]"])
def test_event_not_an_object_is_refused(api, body):
    assert fields(api.raw(body)) == [""]


def test_batch_errors_name_each_index(api):
    for empty in (b"[]", b"{}", b"null"):
        assert fields(api.raw(empty, MANY)) == [""]
    answer = api.event(
        cloud_event("e0"),
        cloud_event("e1"),
        cloud_event("e2"),
        cloud_event(...),
        "no event",
        cloud_event("e5", time="never"),
    )
    assert fields(answer) == ["events.3.id", "events.4", "events.5.time"]
    assert fields(api.event(cloud_event("e0"), cloud_event("e1", data={"n": [{"x": "\0"}]}))) == ["events.1.data.n.0.x"]


def test_batch_above_500_events_is_refused(api):
    assert problem(api.event(*(cloud_event(f"e{number}") for number in range(501))))["status"] == 413


def test_error_list_is_bounded(api):
    assert len(fields(api.event(*({} for _ in range(500))))) == 100


@each_row(
    "content_type",
    ["text/plain", "", "multipart/form-data; boundary=x", "application/cloudevents+json; charset=gbk",
     "application/json; charset=nonsense"],
)  # fmt: skip
def test_unsupported_content_type_is_refused(api, content_type):
    assert problem(api.raw(json.dumps(cloud_event()).encode(), content_type))["status"] == 415


def test_compressed_body_is_refused(api):
    bomb = gzip.compress(b"[" + b" " * 50_000_000 + b"]")
    answer = api.raw(bomb, **{"Content-Encoding": "gzip"})
    assert problem(answer)["status"] == 415


BINARY = {f"ce-{name}": value for name, value in cloud_event(data=...).items()}


@each_row(
    "headers, field",
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
def test_invalid_binary_header_is_refused(api, headers, field):
    assert fields(api("POST", "/events", {}, headers=BINARY | headers)) == [field]


def test_binary_data_follows_the_same_rules(api):
    assert fields(api.raw(b'{"n": NaN}', "application/json", **BINARY)) == ["data.n"]
    assert fields(api.raw(b"[1]", "application/json", **BINARY)) == ["data"]
    assert problem(api.raw(b"<x/>", "text/xml", **BINARY))["status"] == 415


# --- as bytes on the wire --------------------------------------------------------------------------------------------


def send_raw(address, *parts):
    """Send this and read what is answered, until the server ends the connection or has answered."""
    parsed = urlsplit(address)
    with socket.create_connection((parsed.hostname, parsed.port), WAIT_LIMIT) as wire:
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


def head(api, *lines):
    usual = ["POST /api/v1/events HTTP/1.1", "Host: x", f"Authorization: Bearer {api.key}",
             "Content-Type: application/cloudevents+json"]  # fmt: skip
    return "\r\n".join([*usual, *lines, "", ""]).encode()


def test_announced_oversized_body_is_not_read(api):
    answer = send_raw(api.address, head(api, f"Content-Length: {MEGABYTE + 1}"))
    assert answer.startswith(b"HTTP/1.1 413")
    assert b"application/problem+json" in answer


def test_chunked_body_is_read_up_to_the_limit(api):
    chunk = b"10000\r\n" + b" " * 65536 + b"\r\n"
    answer = send_raw(api.address, head(api, "Transfer-Encoding: chunked"), *([chunk] * 17))
    assert answer.startswith(b"HTTP/1.1 413")
    assert b"onnection: close" in answer


def test_duplicate_header_is_refused(api):
    names = [f"ce-{name}: {value}" for name, value in cloud_event(data=...).items()]
    request = head(api, *names, "ce-id: e2", "Content-Length: 2").replace(b"cloudevents+json", b"json") + b"{}"
    answer = send_raw(api.address, request)
    assert answer.startswith(b"HTTP/1.1 422")
    assert b'"field": "id"' in answer
