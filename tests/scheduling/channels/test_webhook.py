from datetime import UTC, datetime, timedelta, timezone
from uuid import UUID

import pytest
import time_machine
from standardwebhooks.webhooks import Webhook as Verifier

from scheduling.channels.base import Delivered, Permanent, Transient, Unknown
from scheduling.channels.webhook import Webhook, read_secrets, sign_request
from tests.scheduling.channels.http_receivers import MessageFactory, Receiver, always, build_message, reply, time_out
from tests.support.tables import each_row

SECRET = "whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw"
OTHER = "whsec_C2FVsBQIhrscChlQIMV+b5sSYspob7oD"
TIMEOUT = timedelta(seconds=30)


async def sent(receiver, *, repeatable=True, **config):
    return await Webhook({"url": receiver.url} | config, TIMEOUT).send(build_message(repeatable=repeatable))


def test_signature_matches_the_public_vector():
    """github.com/standard-webhooks, the libraries' shared example."""

    message_id = "msg_p5jXN8AQM9LWM0D4loKWxJek"
    now = datetime.fromtimestamp(1614265330, timezone(timedelta(hours=8)))  # 8 hours off with the library alone

    headers = sign_request(message_id, b'{"test": 2432232314}', now, (SECRET,))

    assert headers["webhook-timestamp"] == "1614265330"
    assert headers["webhook-signature"] == "v1,g0hM9SsE+OTPJTGt/tmIKtSyZlE3uFJELVlNIOLJ1OE="


async def test_webhook_sends_traceparent_on_each_attempt():
    trace_id = UUID("4bf92f3577b34da6a3ce929d0e0e4736")
    async with Receiver() as receiver:
        channel = Webhook({"url": receiver.url}, TIMEOUT)
        for message in (
            build_message(),
            build_message(trace_id=trace_id),
            build_message(trace_id=trace_id),
        ):
            await channel.send(message)

    without, first, second = receiver.requests
    assert "traceparent" not in without.headers
    assert first.headers["traceparent"] == f"00-{trace_id.hex}-{MessageFactory.task_id.hex[16:]}-01"
    assert second.headers["traceparent"] == first.headers["traceparent"]


async def test_webhook_sends_signed_touch():
    async with Receiver() as receiver:
        outcome = await sent(receiver, secret=SECRET)

    assert outcome == Delivered("ok", 200)
    (request,) = receiver.requests
    Verifier(SECRET).verify(request.body, request.headers)
    assert request.headers["webhook-id"] == str(MessageFactory.delivery_key)
    assert request.headers["content-type"].startswith("application/json")
    assert request.json["data"] == {
        "task_id": str(MessageFactory.task_id),
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


async def test_webhook_rotated_secrets_both_verify():
    async with Receiver() as receiver:
        await sent(receiver, secret=f"{SECRET} {OTHER}")
        await sent(receiver, secret=[SECRET, OTHER])
        await sent(receiver)

    *signed, plain = receiver.requests
    for request in signed:
        for each in (SECRET, OTHER):
            Verifier(each).verify(request.body, request.headers)
    assert "webhook-signature" not in plain.headers
    assert plain.headers["webhook-id"] == str(MessageFactory.delivery_key)
    assert abs(int(plain.headers["webhook-timestamp"]) - datetime.now(UTC).timestamp()) < 60


async def test_community_target_overrides_the_channel():
    channel = Webhook({"url": "https://example.com/hook", "secret": SECRET}, TIMEOUT)
    async with Receiver() as receiver:
        plain = build_message(target={"url": receiver.url})
        own = build_message(target={"url": receiver.url, "secret": OTHER})
        assert isinstance(await channel.send(plain), Delivered)
        assert isinstance(await channel.send(own), Delivered)

    first, second = receiver.requests
    Verifier(SECRET).verify(first.body, first.headers)
    Verifier(OTHER).verify(second.body, second.headers)
    assert channel.target_key(plain) == channel.target_key(own) != channel.target_key(build_message())
    assert receiver.url not in channel.target_key(plain)


RETRY = {"retry-after": "120"}


@each_row(
    "status, headers, expected",
    [
        (200, {}, Delivered("said", 200)),
        (301, {"location": "http://169.254.169.254/"}, Permanent("redirect", "redirects are not followed", 301)),
        (400, {}, Transient("http_400", "said", None, 400)),
        (401, RETRY, Transient("http_401", "said", timedelta(seconds=120), 401)),
        (404, {}, Transient("http_404", "said", None, 404)),
        (408, {}, Transient("http_408", "said", None, 408)),
        (410, {}, Permanent("gone", "said", 410, disable_target=True)),
        (413, {}, Permanent("http_413", "said", 413)),
        (422, {}, Permanent("http_422", "said", 422)),
        (425, {}, Transient("http_425", "said", None, 425)),
        (429, RETRY, Transient("throttled", "said", timedelta(seconds=120), 429)),
        (500, {}, Transient("http_500", "said", None, 500)),
        (502, {}, Unknown("http_502", "said")),
        (503, RETRY, Transient("http_503", "said", timedelta(seconds=120), 503)),
        (503, {"retry-after": "-5"}, Transient("http_503", "said", None, 503)),
        (503, {"retry-after": "soon"}, Transient("http_503", "said", None, 503)),
        (503, {"retry-after": "Fri, 31 Dec 1999 23:59:59 GMT"}, Transient("http_503", "said", timedelta(0), 503)),
        (503, {"retry-after": "Fri, 31 Dec 9999 23:59:59 GMT"}, Transient("http_503", "said", timedelta(days=1), 503)),
        (504, {}, Unknown("http_504", "said")),
        (599, {}, Transient("http_599", "said", None, 599)),
        (799, {}, Permanent("http_other", "said", 799)),
    ],
)
async def test_webhook_status_determines_outcome(status, headers, expected):
    async with Receiver(always(reply(status, b"said", headers))) as receiver:
        assert await sent(receiver) == expected

    assert len(receiver.requests) == 1


@each_row(
    "status, expected",
    [*((status, Permanent) for status in (400, 404, 410, 422)), *((status, Unknown) for status in (500, 502, 504))],
)
async def test_refusal_of_what_cannot_be_repeated_is_final_and_an_error_unknown(status, expected):
    async with Receiver(always(reply(status))) as receiver:
        assert isinstance(await sent(receiver, repeatable=False), expected)


async def test_retry_after_date_counts_from_now():
    date = {"retry-after": "Fri, 20 Nov 2026 08:02:00 GMT"}
    with time_machine.travel(datetime(2026, 11, 20, 8, 0, tzinfo=UTC), tick=False):
        async with Receiver(always(reply(503, b"", date))) as receiver:
            assert await sent(receiver) == Transient("http_503", "", timedelta(minutes=2), 503)


async def test_webhook_timeout_is_unknown():
    async with Receiver(time_out) as receiver:
        channel = Webhook({"url": receiver.url}, timedelta(seconds=20))
        outcome = await channel.send(build_message())
    assert (type(outcome), getattr(outcome, "reason", "")) == (Unknown, "timeout")


async def test_bad_target_is_permanent_without_url():
    channel = Webhook({"url": "https://example.com/"}, TIMEOUT)

    outcome = await channel.send(build_message(target={"url": "https://10.0.0.1/secret-path"}))

    assert outcome == Permanent("bad_target", "url: the address is not public")


@each_row(
    "config, error",
    [
        ({}, "url: is missing"),
        ({"url": "http://example.com/"}, "url: only https"),
        ({"url": "https://10.0.0.1/"}, "url: the address is not public"),
        ({"url": "https://example.com/", "secret": "plain"}, "secret: must be whsec_"),
        ({"url": "https://example.com/", "secret": "whsec_c2hvcnQ="}, "secret: must be whsec_"),
        ({"url": "https://example.com/", "secret": [1]}, "secret: must be text"),
    ],
)
def test_webhook_config_errors_name_the_field(config, error):
    with pytest.raises(ValueError) as raised:
        Webhook(config, TIMEOUT)

    assert str(raised.value).startswith(error)


def test_webhook_settings_that_are_accepted():
    assert read_secrets({"secret": "whsec_" + "A" * 35}) == ("whsec_" + "A" * 35,), "padding is optional"
    Webhook.validate_target({})
    with pytest.raises(ValueError, match="url: is missing"):
        Webhook.validate_target({"secret": SECRET})
