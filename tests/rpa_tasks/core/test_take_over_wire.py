"""What a page may send to a shop's browser, and how it travels."""

import asyncio
import json
from contextlib import suppress

from rpa_tasks.takeover.page_socket import is_own_origin
from rpa_tasks.takeover.wire import BadInput, Sealer, parse_input, run_until_one_ends

MOUSE = {"do": "mouse", "type": "mousePressed", "x": 1, "y": 2, "button": "left", "buttons": 1, "clicks": 1,
         "modifiers": 0}  # fmt: skip
PART = {"do": "upload", "chooser": 1, "token": "t", "number": 0, "of": 1, "name": "a.png", "size": 3, "offset": 0,
        "data": "eHl6"}  # fmt: skip


REFUSED = [
    None, [], "x", {}, {"do": "Page.navigate", "url": "https://a.example"}, {"do": ["go"]}, {"do": "go"},
    {"do": "go", "url": "file:///etc/passwd"}, {"do": "go", "url": "javascript://x/%0aalert(1)"},
    {"do": "go", "url": "chrome://settings"}, {"do": "go", "url": "https://"}, {"do": "go", "url": "a" * 3_000},
    MOUSE | {"x": "1"}, MOUSE | {"x": float("inf")}, MOUSE | {"x": True}, MOUSE | {"type": "mouseWheel"},
    MOUSE | {"clicks": 99}, {"do": "text", "text": "x" * 10_001}, {"do": "text", "text": 1},
    {"do": "ack", "number": -1},
    PART | {"data": "?"}, PART | {"data": None}, PART | {"data": "eHl6" * 16_000}, PART | {"size": -1},
    PART | {"number": 20}, PART | {"of": 21}, PART | {"name": "a" * 256}, {"do": "fetch", "id": 1, "offset": 0},
    {"do": "dialog", "id": 1, "accept": "yes", "text": ""}, {"do": "dialog", "id": 1, "accept": {}, "text": ""},
    {"do": "dialog", "accept": True, "text": ""},
]  # fmt: skip


def accepted(texts):
    found = []
    for text in texts:
        with suppress(BadInput):
            parse_input(text)
            found.append(text[:200])
    return found


def test_input_outside_the_list_is_refused():
    assert accepted(map(json.dumps, REFUSED)) == []
    assert accepted(["", "{", "[" * 50_000, "x" * 70_000]) == []


def test_input_keeps_checked_fields_only():
    assert parse_input(json.dumps(MOUSE | {"sessionId": "other", "connection": "c"})) == MOUSE
    assert parse_input(json.dumps(PART | {"path": "/etc/passwd"})) == PART
    assert parse_input('{"do": "go", "url": " mms.pinduoduo.com/login "}')["url"] == "https://mms.pinduoduo.com/login"
    assert parse_input('{"do": "go", "url": "http://[::1]:80/"}')["url"] == "http://[::1]:80/"


def test_sealed_message_opens_only_with_its_key_and_channel():
    sealer = Sealer(b"k" * 32, "in")
    sealed = sealer.seal("密码".encode())
    assert sealer.open(sealed) == "密码".encode()
    assert sealer.seal(b"x") != sealer.seal(b"x")
    assert [Sealer(b"j" * 32, "in").open(sealed), Sealer(b"k" * 32, "out").open(sealed)] == [None, None]
    assert [sealer.open(sealed[:-1] + b"x"), sealer.open(b""), sealer.open(b"short")] == [None, None, None]


def test_steps_end_although_one_loses_a_cancellation():
    async def lose_one():
        with suppress(asyncio.CancelledError):  # as `asyncio.wait_for` of Python 3.11 does in a race
            await asyncio.sleep(60)
        await asyncio.sleep(60)

    async def end():
        await asyncio.sleep(0)
        return "ended"

    assert asyncio.run(asyncio.wait_for(run_until_one_ends(lose_one(), end()), 30)) == "ended"


def test_only_pages_of_this_host_may_connect(settings):
    settings.ALLOWED_HOSTS, settings.CSRF_TRUSTED_ORIGINS = ["a.example"], ["https://b.example"]
    own = ("https://a.example:8443", "https://A.example:8443", "https://b.example")
    foreign = ("", "null", "https://a.example", "http://evil.example", "http://[", "a.example:8443", "https://\xff")
    found = {
        each: is_own_origin({b"host": b"a.example:8443", b"origin": each.encode("latin-1")}) for each in own + foreign
    }
    assert found == dict.fromkeys(own, True) | dict.fromkeys(foreign, False)
    assert not is_own_origin({b"host": b"evil.example", b"origin": b"http://evil.example"})
    assert not is_own_origin({b"origin": b"http://a.example"})
