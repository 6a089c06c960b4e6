from __future__ import annotations

import asyncio
import json
from datetime import UTC, datetime, timedelta, timezone
from typing import Any
from uuid import UUID

import pytest
import time_machine
from standardwebhooks.webhooks import Webhook as Verifier

from config.local.processes import select_port
from scheduling.channels.base import Delivered, Outcome, Permanent, Transient, Unknown
from scheduling.channels.webhook import Webhook, read_secrets, signed_headers
from tests.scheduling.channels.receivers import Cast, Receiver, Request, always, never, reply, reset

SECRET = "whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw"
OTHER = "whsec_C2FVsBQIhrscChlQIMV+b5sSYspob7oD"
TIMEOUT = timedelta(seconds=5)


def far() -> datetime:
    return datetime.now(UTC) + timedelta(seconds=30)


async def sent(cast: Cast, receiver: Receiver, *, repeatable: bool = True, **config: Any) -> Outcome:
    return await Webhook({"url": receiver.url} | config, TIMEOUT).send(cast.message(repeatable=repeatable), far())


def test_the_public_vector_of_standard_webhooks() -> None:
    """github.com/standard-webhooks, the libraries' shared example."""

    class _Vector:
        delivery_key = "msg_p5jXN8AQM9LWM0D4loKWxJek"

    now = datetime.fromtimestamp(1614265330, timezone(timedelta(hours=8)))  # 8 hours off with the library alone

    headers = signed_headers(_Vector(), b'{"test": 2432232314}', now, (SECRET,))  # type: ignore[arg-type]

    assert headers["webhook-timestamp"] == "1614265330"
    assert headers["webhook-signature"] == "v1,g0hM9SsE+OTPJTGt/tmIKtSyZlE3uFJELVlNIOLJ1OE="


async def test_the_trace_is_handed_on_with_the_same_span_on_each_attempt(cast: Cast) -> None:
    trace_id = UUID("4bf92f3577b34da6a3ce929d0e0e4736")
    async with Receiver() as receiver:
        channel = Webhook({"url": receiver.url}, TIMEOUT)
        for message in (cast.message(), cast.message(trace_id=trace_id), cast.message(trace_id=trace_id)):
            await channel.send(message, far())

    without, first, second = receiver.requests
    assert "traceparent" not in without.headers
    assert first.headers["traceparent"] == f"00-{trace_id.hex}-{cast.task_id.hex[16:]}-01"
    assert second.headers["traceparent"] == first.headers["traceparent"]


async def test_the_receiver_gets_the_touch_signed(cast: Cast) -> None:
    async with Receiver() as receiver:
        outcome = await sent(cast, receiver, secret=SECRET)

    assert outcome == Delivered("ok", 200)
    (request,) = receiver.requests
    Verifier(SECRET).verify(request.body, request.headers)
    assert request.headers["webhook-id"] == str(cast.delivery_key)
    assert request.headers["content-type"].startswith("application/json")
    assert request.json["data"] == {
        "task_id": str(cast.task_id),
        "user_id": "alice",
        "chat_id": "c1",
        "node": "presale-download",
        "content_type": "guide",
        "body": "您好 Alice，指南在此 👩‍👩‍👧",
        "event": {
            "source": "shop",
            "id": "e-1",
            "type": "material.downloaded",
            "time": "2026-11-20T08:00:00Z",
        },
    }
    assert set(request.json) == {"type", "timestamp", "data"}
    assert datetime.fromisoformat(request.json["timestamp"]).tzinfo is not None


@pytest.mark.parametrize("secret", [f"{SECRET} {OTHER}", [SECRET, OTHER]])
async def test_while_secrets_rotate_either_verifies(cast: Cast, secret: Any) -> None:
    async with Receiver() as receiver:
        await sent(cast, receiver, secret=secret)

    (request,) = receiver.requests
    for each in (SECRET, OTHER):
        Verifier(each).verify(request.body, request.headers)


async def test_without_a_secret_it_is_unsigned_but_has_its_id_and_time(cast: Cast) -> None:
    async with Receiver() as receiver:
        await sent(cast, receiver)

    headers = receiver.requests[0].headers
    assert "webhook-signature" not in headers
    assert headers["webhook-id"] == str(cast.delivery_key)
    assert abs(int(headers["webhook-timestamp"]) - datetime.now(UTC).timestamp()) < 60


async def test_a_community_s_target_overrides_the_channel_s(cast: Cast) -> None:
    channel = Webhook({"url": "https://example.com/hook", "secret": SECRET}, TIMEOUT)
    async with Receiver() as receiver:
        plain = cast.message(target={"url": receiver.url})
        own = cast.message(target={"url": receiver.url, "secret": OTHER})
        assert isinstance(await channel.send(plain, far()), Delivered)
        assert isinstance(await channel.send(own, far()), Delivered)

    first, second = receiver.requests
    Verifier(SECRET).verify(first.body, first.headers)
    Verifier(OTHER).verify(second.body, second.headers)
    assert channel.target_key(plain) == channel.target_key(own) != channel.target_key(cast.message())
    assert receiver.url not in channel.target_key(plain)


RETRY = {"retry-after": "120"}


@pytest.mark.parametrize(
    ("status", "headers", "expected"),
    [
        (200, {}, Delivered("said", 200)),
        (202, {}, Delivered("said", 202)),
        (301, {"location": "http://169.254.169.254/"}, Permanent("redirect", "redirects are not followed", 301)),
        (304, {}, Permanent("redirect", "redirects are not followed", 304)),
        (400, {}, Transient("http_400", "said", None, 400)),
        (401, RETRY, Transient("http_401", "said", timedelta(seconds=120), 401)),
        (403, {}, Transient("http_403", "said", None, 403)),
        (404, {}, Transient("http_404", "said", None, 404)),
        (409, {}, Transient("http_409", "said", None, 409)),
        (408, {}, Transient("http_408", "said", None, 408)),
        (410, {}, Permanent("gone", "said", 410, disable_target=True)),
        (413, {}, Permanent("http_413", "said", 413)),
        (422, {}, Permanent("http_422", "said", 422)),
        (425, {}, Transient("http_425", "said", None, 425)),
        (429, RETRY, Transient("throttled", "said", timedelta(seconds=120), 429)),
        (500, {}, Transient("http_500", "said", None, 500)),
        (502, {}, Unknown("http_502", "said")),
        (503, RETRY, Transient("http_503", "said", timedelta(seconds=120), 503)),
        (503, {"retry-after": "99999999999999999999"}, Transient("http_503", "said", timedelta(days=1), 503)),
        (503, {"retry-after": "-5"}, Transient("http_503", "said", None, 503)),
        (503, {"retry-after": "1e9"}, Transient("http_503", "said", None, 503)),
        (503, {"retry-after": "soon"}, Transient("http_503", "said", None, 503)),
        (503, {"retry-after": "Fri, 31 Dec 1999 23:59:59 GMT"}, Transient("http_503", "said", timedelta(0), 503)),
        (503, {"retry-after": "Fri, 31 Dec 9999 23:59:59 GMT"}, Transient("http_503", "said", timedelta(days=1), 503)),
        (504, {}, Unknown("http_504", "said")),
        (599, {}, Transient("http_599", "said", None, 599)),
        (799, {}, Permanent("http_other", "said", 799)),
    ],
)
async def test_what_a_status_means(cast: Cast, status: int, headers: dict[str, str], expected: Outcome) -> None:
    body = b"" if status == 304 else b"said"
    async with Receiver(always(reply(status, body, headers))) as receiver:
        assert await sent(cast, receiver) == expected

    assert len(receiver.requests) == 1


async def test_an_http_date_counts_from_now(cast: Cast) -> None:
    date = {"retry-after": "Fri, 20 Nov 2026 08:02:00 GMT"}
    with time_machine.travel(datetime(2026, 11, 20, 8, 0, tzinfo=UTC), tick=False):
        async with Receiver(always(reply(503, b"", date))) as receiver:
            assert await sent(cast, receiver) == Transient("http_503", "", timedelta(minutes=2), 503)


@pytest.mark.parametrize("status", [400, 401, 403, 404, 409, 410, 413, 422])
async def test_client_error_on_a_channel_that_is_not_repeatable_is_permanent(cast: Cast, status: int) -> None:
    async with Receiver(always(reply(status))) as receiver:
        assert isinstance(await sent(cast, receiver, repeatable=False), Permanent)


@pytest.mark.parametrize("status", [500, 502, 504])
async def test_an_error_that_may_hide_an_effect_is_unknown_where_a_repeat_has_a_second_one(
    cast: Cast, status: int
) -> None:
    async with Receiver(always(reply(status))) as receiver:
        assert await sent(cast, receiver, repeatable=False) == Unknown(f"http_{status}", "ok")


async def test_a_reply_is_kept_to_1000_characters_that_postgresql_takes(cast: Cast) -> None:
    async with Receiver(always(reply(200, b"\x00\xff" + "您".encode() * 5000))) as receiver:
        outcome = await sent(cast, receiver)

    assert isinstance(outcome, Delivered)
    assert outcome.reply == "\N{REPLACEMENT CHARACTER}" + "您" * 999


async def test_connection_refused_is_transient(cast: Cast) -> None:
    channel = Webhook({"url": f"http://127.0.0.1:{select_port()}/"}, TIMEOUT)

    outcome = await channel.send(cast.message(), far())

    assert isinstance(outcome, Transient)
    assert outcome.reason == "connect"


async def test_silence_is_unknown_by_the_sooner_of_deadline_and_timeout(cast: Cast) -> None:
    async with Receiver(lambda request, writer: never()) as receiver:
        by_timeout = Webhook({"url": receiver.url}, timedelta(seconds=1))
        assert await by_timeout.send(cast.message(), far()) == Unknown("timeout", "no answer within the time limit")
        by_deadline = Webhook({"url": receiver.url}, TIMEOUT)
        deadline = datetime.now(UTC) + timedelta(seconds=1)
        assert isinstance(await by_deadline.send(cast.message(), deadline), Unknown)


async def test_a_deadline_that_has_passed_sends_nothing(cast: Cast) -> None:
    async with Receiver() as receiver:
        channel = Webhook({"url": receiver.url}, TIMEOUT)
        outcome = await channel.send(cast.message(), datetime.now(UTC))

    assert isinstance(outcome, Transient)
    assert outcome.reason == "no_time"
    assert receiver.connections == 0


async def test_a_reset_is_unknown(cast: Cast) -> None:
    async def slam(request: Request, writer: asyncio.StreamWriter) -> None:
        reset(writer)

    async with Receiver(slam) as receiver:
        assert isinstance(await sent(cast, receiver), Unknown)


async def test_a_bad_target_is_permanent_and_leaves_no_trace_of_the_url(cast: Cast) -> None:
    channel = Webhook({"url": "https://example.com/"}, TIMEOUT)

    outcome = await channel.send(cast.message(target={"url": "https://10.0.0.1/secret-path"}), far())

    assert outcome == Permanent("bad_target", "url: the address is not public")


async def test_surrogates_and_odd_values_do_not_stop_a_touch(cast: Cast) -> None:
    message = cast.message(body="\ud800 lone", event={"time": datetime(2026, 1, 1, tzinfo=UTC)})
    async with Receiver() as receiver:
        outcome = await Webhook({"url": receiver.url, "secret": SECRET}, TIMEOUT).send(message, far())

    assert isinstance(outcome, Delivered)
    assert json.loads(receiver.requests[0].body)["data"]["body"] == "? lone"


@pytest.mark.parametrize(
    ("config", "error"),
    [
        ({}, "url: is missing"),
        ({"url": 5}, "url: must be text"),
        ({"url": "http://example.com/"}, "url: only https"),
        ({"url": "https://10.0.0.1/"}, "url: the address is not public"),
        ({"url": "https://example.com/", "urll": "x"}, "urll: is not known here"),
        ({"url": "https://example.com/", "secret": "plain"}, "secret: must be whsec_"),
        ({"url": "https://example.com/", "secret": "whsec_c2hvcnQ="}, "secret: must be whsec_"),
        ({"url": "https://example.com/", "secret": "whsec_!!!!"}, "secret: must be whsec_"),
        ({"url": "https://example.com/", "secret": {"a": 1}}, "secret: must be text"),
        ({"url": "https://example.com/", "secret": [1]}, "secret: must be text"),
    ],
)
def test_a_config_that_cannot_work_says_where(config: dict[str, Any], error: str) -> None:
    with pytest.raises(ValueError) as raised:
        Webhook(config, TIMEOUT)

    assert str(raised.value).startswith(error)


def test_a_timeout_must_be_positive() -> None:
    with pytest.raises(ValueError, match="timeout: "):
        Webhook({"url": "https://example.com/"}, timedelta(0))


def test_targets_are_checked_like_configs() -> None:
    Webhook.validate_target({})
    Webhook.validate_target({"url": "https://example.com/"})
    with pytest.raises(ValueError, match="url: is missing"):
        Webhook.validate_target({"secret": SECRET})


def test_padding_of_secrets_is_optional() -> None:
    assert read_secrets({"secret": "whsec_" + "A" * 35}) == ("whsec_" + "A" * 35,)
