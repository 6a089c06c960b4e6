"""Requests through a forward proxy: what it gets, what it may reach, and what a failure of it means."""

import asyncio
import socket
import threading

import pytest

from config.local.processes import select_port
from scheduling.channels.base import (
    CallbackResult,
    Delivered,
    DestinationRefused,
    NoAnswer,
    NotSent,
    Transient,
    Unknown,
)
from scheduling.channels.http_client import LOOKUP_THREADS, before_first_byte, close_shared_transport
from scheduling.channels.vendors import wechat
from scheduling.channels.vendors.declared import DeclaredHttp
from scheduling.channels.vendors.wechat import WeChatService
from scheduling.channels.webhook import Webhook
from tests.scheduling.channels.forward_proxy import ForwardProxy
from tests.scheduling.channels.http_receivers import (
    LONG,
    Receiver,
    always,
    build_message,
    end_time_limits,
    hang_up,
    never,
    post,
    reply,
    transport,
)
from tests.scheduling.channels.test_group_robots import PATHS, SERVERS
from tests.scheduling.channels.test_vendors import SETTINGS, forget_tokens, message_to
from tests.support.tables import each_row

LOGIN, PASSWORD = "buyer:s%40cret-word", "s@cret-word"
PUBLIC = "93.184.216.34"


def lookup_of(**names):
    """Resolve `touch_test` as touch.test. Others are unknown."""

    def lookup(host, port):
        found = names.get(host.replace(".", "_"), socket.gaierror(socket.EAI_NONAME, "Name or service not known"))
        if isinstance(found, OSError):
            raise found
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (address, port)) for address in found]

    return lookup


def with_login(proxy, login=LOGIN):
    return proxy.url.replace("://", f"://{login}@")


@each_row("proxy_scheme", ["http", "https"])
@each_row("scheme", ["http", "https"])
async def test_request_goes_through_proxy_with_password(certificate, scheme, proxy_scheme):
    server, client = certificate
    context, proxy_context = (server if each == "https" else None for each in (scheme, proxy_scheme))
    async with (
        Receiver(context=context) as receiver,
        ForwardProxy(context=proxy_context, login=f"buyer:{PASSWORD}") as proxy,
        transport("127.0.0.1", proxy=with_login(proxy), context=client) as out,
    ):
        response = await post(out, receiver.url + "?sign=%2F")

    assert response.status == 200
    (request,) = receiver.requests
    assert (request.target, request.body, request.headers["x-a"]) == ("/hook?sign=%2F", b"{}", "1")
    assert request.headers["host"] == f"127.0.0.1:{receiver.port}"
    assert not [name for name in request.headers if name.startswith("proxy-")]
    line = f"CONNECT 127.0.0.1:{receiver.port}" if scheme == "https" else f"POST {receiver.url}?sign=%2F"
    assert proxy.targets == [line]


async def test_proxy_gets_the_checked_address_and_target_its_name(certificate):
    server, client = certificate
    names = []
    server.sni_callback = lambda connection, name, context: names.append(name)
    answers = iter([[PUBLIC], ["10.0.0.1"]])

    def lookup(host, port):
        return lookup_of(touch_test=next(answers))(host, port)

    async with (
        Receiver(context=server) as receiver,
        ForwardProxy(port_of=lambda target: receiver.port) as proxy,
        transport(proxy=proxy.url, context=client, lookup=lookup) as out,
    ):
        assert (await post(out, "https://touch.test/hook")).status == 200
        with pytest.raises(DestinationRefused) as failure:
            await post(out, "https://touch.test/hook")

    assert failure.value.reason == "private_address"
    assert proxy.targets == [f"CONNECT {PUBLIC}:443"]
    assert names == ["touch.test"]
    assert receiver.requests[0].headers["host"] == "touch.test"


@each_row("scheme", ["http", "https"])
async def test_host_allowed_by_name_is_resolved_by_the_proxy(certificate, scheme):
    server, client = certificate
    async with (
        Receiver(context=server if scheme == "https" else None) as receiver,
        ForwardProxy() as proxy,
        transport("touch.test", proxy=proxy.url, context=client, lookup=lookup_of()) as out,
    ):
        assert (await post(out, f"{scheme}://touch.test:{receiver.port}/hook")).status == 200

    target = f"touch.test:{receiver.port}"
    assert proxy.targets == [f"CONNECT {target}" if scheme == "https" else f"POST http://{target}/hook"]


async def test_name_unknown_here_is_not_sent_and_names_the_way_out():
    async with ForwardProxy() as proxy, transport(proxy=proxy.url, lookup=lookup_of()) as out:
        with pytest.raises(NotSent, match="AFTERTOUCH_ALLOWED_PRIVATE_HOSTS") as failure:
            await post(out, "https://only-the-proxy.test/")

    assert failure.value.reason == "dns"
    assert proxy.connections == 0


@each_row(
    "url",
    ["https://rebind.test/", "https://10.0.0.1/", "https://localhost/", "http://rebind.test/"],
)
async def test_private_target_behind_proxy_is_refused(url):
    found = lookup_of(rebind_test=["127.0.0.1", "10.0.0.1"])
    async with ForwardProxy() as proxy, transport(proxy=proxy.url, lookup=found) as out:
        with pytest.raises(DestinationRefused):
            await post(out, url)

    assert proxy.connections == 0


async def test_proxy_that_cannot_reach_an_address_is_asked_for_the_next(certificate):
    server, client = certificate
    found = lookup_of(touch_test=["2606:2800:220:1::1", PUBLIC])
    async with (
        Receiver(context=server) as receiver,
        ForwardProxy(port_of=lambda target: receiver.port, refusals={"[2606:2800:220:1::1]:443": reply(503)}) as proxy,
        transport(proxy=proxy.url, context=client, lookup=found) as out,
    ):
        assert (await post(out, "https://touch.test/")).status == 200

    assert proxy.targets == ["CONNECT [2606:2800:220:1::1]:443", f"CONNECT {PUBLIC}:443"]


async def test_name_that_is_not_answered_delays_no_other_target(certificate):
    """Each request looked the name up in a thread of its own, and no thread was left."""
    server, client = certificate
    release = threading.Event()

    def lookup(host, port):
        if host == "slow.test":
            release.wait(60)
        return lookup_of(slow_test=[PUBLIC], touch_test=[PUBLIC])(host, port)

    async with (
        Receiver(context=server) as receiver,
        ForwardProxy(port_of=lambda target: receiver.port) as proxy,
        transport(proxy=proxy.url, context=client, lookup=lookup) as out,
    ):
        slow = [asyncio.create_task(post(out, "https://slow.test/")) for _ in range(LOOKUP_THREADS + 1)]
        try:
            await asyncio.sleep(0)
            assert (await post(out, "https://touch.test/")).status == 200
        finally:
            release.set()
            await asyncio.gather(*slow, return_exceptions=True)


@each_row(
    "broken, login, reason",
    [
        ({}, "buyer:wrong-word", "proxy"),
        ({}, "", "proxy"),
        ({"refusals": {"": reply(403)}}, LOGIN, "proxy"),
        ({"refusals": {"": reply(502)}}, LOGIN, "proxy"),
        ({"refusals": {"": reply(504)}}, LOGIN, "proxy"),
        ({"answer": always(b"220 smtp.example.com ESMTP\r\n\r\n")}, LOGIN, "proxy"),
        ({"answer": hang_up}, LOGIN, "proxy"),
        ({"answer": "hang"}, LOGIN, "connect_timeout"),
    ],
)
async def test_proxy_that_opens_no_tunnel_means_not_sent(broken, login, reason):
    marked = []

    async def mark():
        marked.append(True)

    async def hang(request, writer):
        end_time_limits()
        await never()

    broken = {"answer": hang} if broken.get("answer") == "hang" else broken
    async with (
        ForwardProxy(login=f"buyer:{PASSWORD}", **broken) as proxy,
        transport("127.0.0.1", proxy=with_login(proxy, login)) as out,
    ):
        outer = before_first_byte.set(mark)
        with pytest.raises(NotSent) as failure:
            await post(out, "https://127.0.0.1:1/", repeatable=True)
        before_first_byte.reset(outer)

    assert failure.value.reason == reason
    assert isinstance(failure.value.outcome(), Transient)
    assert not marked
    assert not [word for word in ("cret-word", "wrong-word", "buyer") if word in str(failure.value)]


@each_row("url", ["https://127.0.0.1:1/", "http://127.0.0.1:1/"])
@each_row("host", ["127.0.0.1", "no-such-proxy.test"])
async def test_proxy_that_is_down_means_not_sent(url, host):
    proxy = f"http://{LOGIN}@{host}:{select_port()}"
    async with transport("127.0.0.1", proxy=proxy, lookup=lookup_of()) as out:
        with pytest.raises(NotSent, match="the proxy") as failure:
            await post(out, url)

    assert failure.value.reason == "proxy"


async def test_untrusted_target_behind_proxy_is_not_sent(certificate):
    async with (
        Receiver(context=certificate[0]) as receiver,
        ForwardProxy() as proxy,
        transport("127.0.0.1", proxy=proxy.url) as out,
    ):
        with pytest.raises(NotSent) as failure:
            await post(out, receiver.url)

    assert failure.value.reason == "tls"
    assert receiver.requests == []


@each_row(
    "proxy, repeatable, outcome, reason",
    [
        (ForwardProxy(login="buyer:other"), False, Transient, "proxy"),
        (ForwardProxy(refusals={"": reply(502)}), True, Unknown, "http_502"),
        (ForwardProxy(refusals={"": reply(504)}), False, Unknown, "http_504"),
        (ForwardProxy(refusals={"": reply(503)}), False, Transient, "http_503"),
        (ForwardProxy(answer=hang_up), False, Unknown, "disconnected"),
    ],
)
async def test_plain_request_ends_as_at_a_gateway(settings, proxy, repeatable, outcome, reason):
    await close_shared_transport()  # of another proxy
    async with proxy:
        settings.AFTERTOUCH_HTTP_PROXY = proxy.url
        channel = Webhook({"url": "http://127.0.0.1:1/"}, LONG)
        ended = await channel.send(build_message(repeatable=repeatable))

    assert isinstance(ended, outcome)
    assert ended.reason == reason


async def test_target_that_dies_behind_proxy_is_no_answer(certificate):
    server, client = certificate
    async with (
        Receiver(hang_up, context=server) as receiver,
        ForwardProxy() as proxy,
        transport("127.0.0.1", proxy=proxy.url, context=client) as out,
    ):
        with pytest.raises(NoAnswer):
            await post(out, receiver.url)


@each_row("scheme", ["http", "https"])
async def test_connections_through_proxy_are_reused_if_repeatable_only(certificate, scheme):
    server, client = certificate
    async with (
        Receiver(context=server if scheme == "https" else None) as receiver,
        ForwardProxy() as proxy,
        transport("127.0.0.1", proxy=proxy.url, context=client) as out,
    ):
        for _ in range(3):
            await post(out, receiver.url, repeatable=True)
        assert (proxy.connections, receiver.connections) == (1, 1)
        for _ in range(2):
            await post(out, receiver.url)

    assert (proxy.connections, receiver.connections, len(receiver.requests)) == (3, 3, 5)


async def test_names_of_one_address_share_no_connection(certificate):
    server, client = certificate
    found = lookup_of(touch_test=[PUBLIC], other_test=[PUBLIC])
    async with (
        Receiver(context=server) as receiver,
        ForwardProxy(port_of=lambda target: receiver.port) as proxy,
        transport(proxy=proxy.url, context=client, lookup=found) as out,
    ):
        assert (await post(out, "https://touch.test/", repeatable=True)).status == 200
        with pytest.raises(NotSent) as failure:
            await post(out, "https://other.test/", repeatable=True)

    assert failure.value.reason == "tls"
    assert len(receiver.requests) == 1


async def test_private_proxy_of_installation_is_used_and_opens_no_target(certificate):
    server, client = certificate
    found = lookup_of(proxy_test=["127.0.0.1"], touch_test=[PUBLIC])
    async with Receiver(context=server) as receiver, ForwardProxy(port_of=lambda target: receiver.port) as proxy:
        through = f"http://proxy.test:{proxy.port}"
        async with transport(proxy=through, context=client, lookup=found) as out:
            assert (await post(out, "https://touch.test/")).status == 200
            assert (await post(out, "https://touch.test/", proxy=through)).status == 200
            for own in ("", "direct"):
                with pytest.raises(DestinationRefused):
                    await post(out, f"https://proxy.test:{proxy.port}/", proxy=own)

    assert len(proxy.targets) == 2


async def test_private_proxy_of_channel_needs_permission():
    found = lookup_of(proxy_test=["127.0.0.1"], touch_test=[PUBLIC])
    async with ForwardProxy(refusals={"": reply(502)}) as proxy:
        own = f"http://proxy.test:{proxy.port}"
        async with transport(lookup=found) as out:
            with pytest.raises(DestinationRefused) as failure:
                await post(out, "https://touch.test/", proxy=own)
        assert failure.value.reason == "private_address"
        assert proxy.connections == 0
        for allowed in ("proxy.test", "127.0.0.0/8"):
            async with transport(allowed, lookup=found) as out:
                with pytest.raises(NotSent, match="502"):
                    await post(out, "https://touch.test/", proxy=own)


async def test_plain_request_is_not_shown_to_a_proxy_of_an_editor():
    async with Receiver() as receiver, transport("127.0.0.1") as out:
        with pytest.raises(DestinationRefused) as failure:
            await post(out, receiver.url, proxy=f"http://{PUBLIC}:3128")

    assert failure.value.reason == "scheme"


async def test_proxy_of_channel_overrides_that_of_installation(settings):
    async with Receiver() as receiver, ForwardProxy() as shared, ForwardProxy(login=f"buyer:{PASSWORD}") as own:
        settings.AFTERTOUCH_HTTP_PROXY = shared.url
        for config in ({}, {"proxy": ""}, {"proxy": with_login(own)}, {"proxy": "direct"}):
            channel = Webhook({"url": receiver.url, **config}, LONG)
            assert isinstance(await channel.send(build_message()), Delivered)

    assert (len(shared.targets), len(own.targets), len(receiver.requests)) == (2, 1, 4)


@each_row("kind", [Webhook, DeclaredHttp, *SERVERS, *SETTINGS])
@each_row("own", [False, True])
async def test_every_kind_uses_the_proxy(settings, token_server, monkeypatch, kind, own):
    """Also for access tokens."""
    monkeypatch.setattr(wechat, "LONGEST_SYNC", LONG)
    ok = b'{"errcode": 0, "access_token": "a-token-of-the-vendor", "expires_in": 7200, "code": 0}'
    await close_shared_transport()  # of another proxy
    forget_tokens()
    async with Receiver(always(reply(200, ok))) as receiver, ForwardProxy() as proxy:
        settings.AFTERTOUCH_HTTP_PROXY = "" if own else proxy.url
        base = receiver.url.removesuffix("/hook")
        config = {
            "url": base if kind in SETTINGS else receiver.url,
            **SETTINGS.get(kind, {}),
            **({"proxy": proxy.url} if own else {}),
        }
        message = build_message()
        if kind in SERVERS:
            del config["url"]
            message = build_message(target={"url": base + PATHS[kind]})
        elif kind in SETTINGS:
            message = message_to(kind)
        elif kind is DeclaredHttp:
            config |= {"token": {"url": f"{base}/token"}, "headers": {"X-Token": "{{ channel.token }}"}}
        channel = kind(config, LONG)
        await channel.send(message)
        if kind is WeChatService:
            await asyncio.to_thread(channel.fetch_messages, CallbackResult(sync_token="token"), "")

    asked = [f"{request.method} {base}{request.target}" for request in receiver.requests]
    assert asked == proxy.targets
    assert asked
