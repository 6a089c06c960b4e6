import asyncio
import email
import email.policy
import traceback
import tracemalloc
from base64 import urlsafe_b64decode
from datetime import timedelta
from email.message import EmailMessage
from email.utils import parseaddr

import pytest
from django.core import signing

from config.local.processes import select_port
from scheduling.channels.base import Delivered, InvalidSetting, Permanent, Transient, Unknown
from scheduling.channels.email import (
    Conversation,
    Email,
    Relay,
    make_token,
    parse_relay,
    read_token,
)
from tests.scheduling.channels.http_receivers import MessageFactory, build_message
from tests.scheduling.channels.relays import RelayServer
from tests.support.tables import each_row

TIMEOUT = timedelta(seconds=30)
TO_ALICE = {"address": "alice@example.org"}


async def sent(url, timeout=TIMEOUT, **changes):
    channel = Email({"url": url}, timeout)
    return await channel.send(build_message(**{"target": TO_ALICE} | changes))


def read(dialog):
    content = dialog.content.removesuffix(b".\r\n").replace(b"\r\n..", b"\r\n.")
    parsed = email.message_from_bytes(content, policy=email.policy.SMTP)
    assert isinstance(parsed, EmailMessage)
    return parsed


async def test_mail_arrives_whole():
    async with RelayServer() as relay:
        outcome = await sent(relay.url, body="您好\n.\n..点\n" + "长" * 2000)

    assert outcome == Delivered("2.0.0 queued as 1", 250)
    (dialog,) = relay.mails
    message = read(dialog)
    assert message["subject"] == "使用指南"
    assert message["from"] == "客服 <hello@shop.example.com>"
    assert message["to"] == "alice@example.org"
    assert message["message-id"] == f"<{MessageFactory.delivery_key}@touch.example.com>"
    assert message["list-unsubscribe"] is None
    assert message.get_content().replace("\r\n", "\n").rstrip("\n") == "您好\n.\n..点\n" + "长" * 2000
    assert "MAIL FROM:<hello@shop.example.com>" in [line.partition(" size=")[0].upper().replace(
        "HELLO@SHOP.EXAMPLE.COM", "hello@shop.example.com") for line in dialog.said]  # fmt: skip
    assert max(len(line) for line in dialog.content.split(b"\r\n")) <= 998
    assert dialog.content.isascii()


async def test_marketing_mail_has_one_click_unsubscribe():
    async with RelayServer() as relay:
        await sent(relay.url, category="marketing")

    message = read(relay.mails[0])
    link = str(message["list-unsubscribe"]).strip()  # folded: it is longer than a line
    assert link.startswith("<https://touch.example.com/u/")
    assert message["list-unsubscribe-post"] == "List-Unsubscribe=One-Click"
    assert read_token(link.rpartition("/")[2].removesuffix(">")) == "alice"


@each_row("user_id", ["用户/1", "x" * 200])
def test_token_names_customer_and_cannot_be_forged(user_id, settings):
    settings.SECRET_KEY = "a-key-" * 10
    token = make_token(user_id)

    assert read_token(token) == user_id
    assert "/" not in token
    for forged in (token[:-1], token + "x", signing.dumps(user_id, salt="other"), "", "a:b:c"):
        with pytest.raises(signing.BadSignature):
            read_token(forged)
    settings.SECRET_KEY_FALLBACKS = [settings.SECRET_KEY]
    settings.SECRET_KEY = "another-key-" * 5
    assert read_token(token) == user_id
    settings.SECRET_KEY_FALLBACKS = []
    with pytest.raises(signing.BadSignature):
        read_token(token)


def test_token_shows_nothing_of_the_user_id():
    user_id = "customer-4711"
    token = make_token(user_id)
    shown = token + "".join(
        urlsafe_b64decode(token[start:] + "=" * (-len(token[start:]) % 4)).decode("latin-1") for start in range(4)
        if len(token[start:]) % 4 != 1
    )  # fmt: skip
    assert user_id not in shown
    assert "4711" not in shown
    assert make_token(user_id) != token, "two mails to one customer cannot be told to be of one"


@each_row("breaker", ["\r\n", "\r", "\u2028", "\x00"])
async def test_subject_cannot_add_a_header(breaker):
    async with RelayServer() as relay:
        outcome = await sent(relay.url, subject=f"Hi{breaker}Bcc: eve@example.org")

    assert isinstance(outcome, Delivered)
    message = read(relay.mails[0])
    assert message["bcc"] is None
    assert message["subject"] == "Hi Bcc: eve@example.org"


@each_row(
    "address",
    ["", "alice@", "alice@example.org\r\nRCPT TO:<eve@example.org>", "alice@example.org, eve@x.org",
     "Alice <alice@example.org>", "alice@example.org\n", "a" * 300 + "@example.org", "alice@example.org\u202c",
     f"alice@例{'x' * 62}.cn"],
)  # fmt: skip
async def test_address_not_single_is_refused(address):
    async with RelayServer() as relay:
        outcome = await sent(relay.url, target={"address": address})

        assert outcome == Permanent("bad_target", "address: must be one mail address")
        assert relay.talks == []


async def test_chinese_domain_is_sent_as_punycode():
    async with RelayServer() as relay:
        await sent(relay.url, target={"address": "alice@例子.公司"})

    assert any("rcpt to:<alice@xn--fsqu00a.xn--55qx5d>" in line.lower() for line in relay.mails[0].said)


@each_row(
    "answers, expected",
    [
        ({"GREETING": "554 no service"}, Transient("smtp_554", "no service", status=554)),
        ({"EHLO": "550 no", "HELO": "550 no"}, Transient("smtp_550", "no", status=550)),  # concerns no recipient
        ({"AUTH": "535 5.7.8 no"}, Transient("smtp_535", "5.7.8 no", status=535)),
        ({"MAIL": "451 later"}, Transient("smtp_451", "later", status=451)),
        ({"MAIL": "553 not you"}, Permanent("smtp_553", "not you", 553)),
        ({"RCPT": "450 greylisted"}, Transient("smtp_450", "greylisted", status=450)),
        ({"RCPT": "550 5.1.1 unknown"}, Permanent("smtp_550", "5.1.1 unknown", 550, disable_target=True)),
        ({"RCPT": "550 5.7.1 policy"}, Permanent("smtp_550", "5.7.1 policy", 550)),
        ({"DATA": "554 no"}, Permanent("smtp_554", "no", 554)),
        ({"DATA": "250 what"}, Transient("garbled", "")),
        ({"END": "451 later"}, Transient("smtp_451", "later", status=451)),
        ({"END": "554 spam"}, Permanent("smtp_554", "spam", 554)),
        ({"END": "HTTP/1.1 400"}, Unknown("garbled", "")),
    ],
)
async def test_smtp_reply_determines_outcome(answers, expected):
    login = "me:pw@" if "AUTH" in answers else ""
    async with RelayServer(answers) as relay:
        assert await sent(relay.url.replace("://", f"://{login}")) == expected


MANY_LINES, LONG_LINE = b"250-more of the same\r\n" * 2_000, b"250 " + b"x" * 64_000


@each_row("flood", [MANY_LINES, LONG_LINE])
@each_row("verb, expected", [("GREETING", Transient), ("DATA", Transient), ("END", Unknown)])
async def test_endless_relay_reply_uses_bounded_memory(verb, expected, flood):
    """Without a bound the reply took all that the relay sent within the timeout: 400 MB in 6 s."""
    taken = 0

    async def endless(dialog):
        nonlocal taken
        while taken < 16_000_000:
            dialog.writer.write(flood)
            await dialog.writer.drain()  # raises when the client hangs up
            taken += len(flood)
        dialog.reset_connection()

    async with RelayServer({verb: endless}) as relay:
        tracemalloc.start()
        try:
            outcome = await sent(relay.url, timedelta(seconds=60))
            peak = tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()
        await relay.await_client_close()

    assert outcome == expected("garbled", "")
    assert peak < 4_000_000
    assert taken < 16_000_000


@each_row("verb", ["GREETING", "RCPT", "DATA"])
@each_row("silent", [True, False])
async def test_break_before_message_is_transient(verb, silent):
    async with RelayServer({verb: drip if silent else reset_connection}) as relay:
        outcome = await sent(relay.url, timedelta(milliseconds=200) if silent else TIMEOUT)

        assert isinstance(outcome, Transient), outcome
        await relay.await_client_close()
        assert relay.mails == []


async def drip(dialog):
    """Send a reply without an end."""
    while True:
        dialog.writer.write(b"2")
        await dialog.writer.drain()
        await asyncio.sleep(0.01)


async def test_reset_after_message_is_unknown():
    async with RelayServer({"END": reset_connection}) as relay:
        outcome = await sent(relay.url)

    assert isinstance(outcome, Unknown)
    assert outcome.reason == "disconnected"


async def test_silence_after_message_is_unknown():
    reached = asyncio.Event()

    async def stay_silent(dialog):
        reached.set()
        return await drip(dialog)

    async with RelayServer({"END": stay_silent}) as relay:
        conversation = Conversation(Relay("127.0.0.1", relay.port))
        running = asyncio.create_task(conversation.run("a@example.org", "b@example.org", b"Subject: x\r\n\r\n", 600))
        await reached.wait()

        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running

        assert isinstance(conversation.broken("timeout"), Unknown)
        await relay.await_client_close()
        assert relay.mails == []


async def test_slow_quit_does_not_delay_the_outcome():
    async with RelayServer({"QUIT": hang}) as relay:
        assert isinstance(await sent(relay.url), Delivered)


async def test_without_time_left_nothing_is_sent():
    async with RelayServer() as relay:
        outcome = await Conversation(Relay("127.0.0.1", relay.port)).run("a@example.org", "b@example.org", b"", 0)

        assert outcome == Transient("connect_timeout", "")
        assert relay.talks == []


async def test_unreachable_relay_is_transient():
    outcome = await sent(f"smtp://127.0.0.1:{select_port()}")

    assert isinstance(outcome, Transient)
    assert outcome.reason == "connect"


async def test_mail_uses_login_and_tls(certificate, monkeypatch):
    server, client = certificate
    monkeypatch.setattr("scheduling.channels.email.ssl.create_default_context", lambda: client)
    async with RelayServer(starttls=server) as relay:
        outcome = await sent(relay.url.replace("://", "://me:p%40ss@") + "?tls=1")
    assert isinstance(outcome, Delivered), outcome
    said = relay.mails[0].said
    assert [line.split(" ")[0].upper() for line in said][:4] == ["EHLO", "STARTTLS", "EHLO", "AUTH"]

    async with RelayServer(context=server) as relay:
        assert isinstance(await sent(relay.url), Delivered)


async def test_relay_that_is_not_safe_is_not_used(certificate):
    async with RelayServer() as relay:
        without_starttls = await sent(relay.url + "?tls=1")
        assert isinstance(without_starttls, Transient)
        assert without_starttls.reason == "smtp_unsupported"
        assert relay.mails == []

    async with RelayServer(context=certificate[0]) as relay:
        untrusted = await sent(relay.url)
    assert isinstance(untrusted, Transient)
    assert untrusted.reason == "tls"


async def test_mail_without_a_relay_goes_to_the_one_of_this_host(monkeypatch):
    async with RelayServer() as relay:
        monkeypatch.setattr("scheduling.channels.email.LOCAL_RELAY", relay.url)
        assert isinstance(await Email({}, TIMEOUT).send(build_message(target=TO_ALICE)), Delivered)
    outcome = await Email({}, TIMEOUT).send(build_message(target=TO_ALICE))
    assert (type(outcome), getattr(outcome, "reason", "")) == (Transient, "connect"), "it certainly was not sent"


async def test_slow_mails_run_concurrently():
    waiting = []
    together = asyncio.Event()

    async def wait_for_all(dialog):
        waiting.append(dialog)
        if len(waiting) == 20:
            together.set()
        await together.wait()
        return "250 2.0.0 ok"

    async with RelayServer({"RCPT": wait_for_all}) as relay:
        outcomes = await asyncio.gather(*(sent(relay.url, timedelta(seconds=60)) for _ in range(20)))

    assert all(isinstance(outcome, Delivered) for outcome in outcomes)


@each_row(
    "sender",
    ["a@b.example, c@d.example", "a@b.example;c@d.example", "Shop <a@b.example> <c@d.example>",
     "a@b.example <c@d.example>", "Group: a@b.example;", "Shop a@b.example", "Shop <a@b.example\u202c>",
     "a@b.example, Shop <c@d.example>", "a@b.example\u200b", "<>", "Shop <>"],
)  # fmt: skip
def test_sender_is_one_address(sender):
    with pytest.raises(InvalidSetting, match=r"^from: must be one mail address"):
        Email({"from": sender}, TIMEOUT)


@each_row(
    "sender",
    ["a@b.example (Shop)", "Shop Inc. <a@b.example>", '"Shop, Inc" <a@b.example>', "店铺（上海） <a@b.example>"],
)
def test_sender_may_have_a_name(sender):
    composed = Email({"from": sender}, TIMEOUT).compose(build_message(target=TO_ALICE))

    assert parseaddr(str(composed.message()["from"]))[1] == "a@b.example"


@each_row(
    "url, relay",
    [
        ("smtp://mail.example.com", Relay("mail.example.com", 25)),
        ("smtp://u:p%3A@mail.example.com:587?tls=1", Relay("mail.example.com", 587, False, True, "u", "p:")),
        ("smtps://u@mail.example.com", Relay("mail.example.com", 465, True, False, "u", "")),
    ],
)
def test_relay_is_parsed(url, relay):
    assert parse_relay(url) == relay


@each_row(
    "url",
    ["mail.example.com", "http://mail.example.com", "smtp://", "smtp://h:p", "smtp://h?tls=yes", "smtp://h/x",
     "smtp://mail..example.com", f"smtp://{'h' * 64}.example.com", "smtp://user:s3cret@[::1",
     "smtp://user：s3cret@mail.example.com", "smtp://user:s3cret／@mail.example.com", "smtp://user:s3cret/@h"],
)  # fmt: skip
def test_invalid_relay_is_refused_without_its_password(url):
    with pytest.raises(InvalidSetting) as refused:
        Email({"url": url}, timedelta(seconds=10))
    assert refused.value.field == "url"
    assert "s3cret" not in "".join(traceback.format_exception(refused.value))


@each_row(
    "config, error",
    [
        ({"from": "nobody"}, "from: must be one mail address"),
        ({"from": "x <a@example.org>\r\nBcc: b@example.org"}, "from: must be one mail address"),
        ({"reply_to": "x"}, "reply_to: must be one mail address"),
        ({"url": "smtp://u:secretpw@h:0x1"}, "url: the port must be"),
    ],
)
def test_email_config_errors_name_the_field(config, error):
    with pytest.raises(ValueError) as raised:
        Email(config, TIMEOUT)

    assert str(raised.value).startswith(error)
    assert "secretpw" not in str(raised.value)


def test_mail_without_base_url_has_no_unsubscribe(settings):
    settings.AFTERTOUCH_BASE_URL = ""

    composed = Email({}, TIMEOUT).compose(build_message(target=TO_ALICE, category="marketing"))

    assert "List-Unsubscribe" not in composed.extra_headers
    assert composed.extra_headers["Message-ID"].endswith("@shop.example.com>")


async def hang(dialog):
    """Stay silent until the client hangs up."""
    while await dialog.reader.read(1024):
        pass
    return


async def reset_connection(dialog):
    dialog.reset_connection()
    return


@each_row("host", ["127.0.0.1", "localhost"])
async def test_configured_relay_cannot_be_private_address(settings, host):
    """The attempt would show its greeting: an editor of channels could scan internal ports."""
    settings.AFTERTOUCH_ALLOWED_PRIVATE_HOSTS = []
    async with RelayServer() as relay:
        url = relay.url.replace("127.0.0.1", host)
        outcome = await sent(url)
        assert isinstance(outcome, Permanent)
        assert outcome.reason == "private_address"
        assert relay.talks == []

        settings.AFTERTOUCH_EMAIL_URL = relay.url  # the administrator's own may be in the same network
        channel = Email({}, TIMEOUT)
        outcome = await channel.send(build_message(target=TO_ALICE))
        assert isinstance(outcome, Delivered)
