"""Receivers on loopback, a message to send, and coroutines as tests."""

from __future__ import annotations

import asyncio
import inspect
import shutil
import ssl
import subprocess
from collections.abc import Iterator
from datetime import timedelta

import pytest
from redis import Redis

from config.environment import environment
from scheduling.channels.http_client import close_shared_transport
from scheduling.channels.quota import QuotaGate
from scheduling.channels.vendors.base import TokenCache


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Run a coroutine test in a loop of its own, and close what it shared."""
    if not inspect.iscoroutinefunction(pyfuncitem.obj):
        return None
    arguments = {name: pyfuncitem.funcargs[name] for name in pyfuncitem._fixtureinfo.argnames}

    async def story() -> None:
        try:
            async with asyncio.timeout(240):
                await pyfuncitem.obj(**arguments)
        finally:
            await close_shared_transport()

    asyncio.run(story())
    return True


@pytest.fixture(autouse=True)
def _channel_settings(settings) -> None:
    settings.AFTERTOUCH_ALLOWED_PRIVATE_HOSTS = ["127.0.0.1"]
    settings.AFTERTOUCH_BASE_URL = "https://touch.example.com"
    settings.AFTERTOUCH_EMAIL_URL = ""
    settings.DEFAULT_FROM_EMAIL = "客服 <hello@shop.example.com>"


@pytest.fixture(scope="session")
def certificate(tmp_path_factory) -> tuple[ssl.SSLContext, ssl.SSLContext]:
    """A server's and a trusting client's TLS context for the names touch.test and 127.0.0.1."""
    if shutil.which("openssl") is None:
        pytest.skip("missing service: openssl")
    folder = tmp_path_factory.mktemp("tls")
    subprocess.run(
        ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-days", "2",
         "-keyout", folder / "key.pem", "-out", folder / "cert.pem", "-subj", "/CN=touch.test",
         "-addext", "subjectAltName=DNS:touch.test,IP:127.0.0.1"],
        check=True, capture_output=True,
    )  # fmt: skip
    server = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    server.load_cert_chain(folder / "cert.pem", folder / "key.pem")
    return server, ssl.create_default_context(cafile=str(folder / "cert.pem"))


def own_database() -> str:
    """A database of our own in the test server: web processes of other tests write to theirs."""
    return f"{environment().redis.rpartition('/')[0]}/9"


@pytest.fixture
def valkey_url() -> str:
    return own_database()


@pytest.fixture
def server(valkey_url) -> Iterator[Redis]:
    """The database, empty."""
    with Redis.from_url(valkey_url, decode_responses=True) as client:
        client.flushdb()
        yield client


@pytest.fixture
def gate(server, valkey_url) -> Iterator[QuotaGate]:
    made = QuotaGate.connect(valkey_url, margin=timedelta(0))
    yield made
    made.close()


@pytest.fixture
def token_server(server, valkey_url, monkeypatch) -> Redis:
    """The tokens of each test, in a Redis that starts empty."""
    cache = TokenCache(Redis.from_url(valkey_url))
    monkeypatch.setattr("scheduling.channels.vendors.base.shared_tokens", lambda: cache)
    return server


def age_tokens(server: Redis) -> None:
    """Let the stored tokens be older than ten seconds, in which a refused one is not replaced."""
    for key in server.keys("at:token:*}"):
        server.pexpire(key, server.pttl(key) - 15_000)


def age_slots(server: Redis, span: timedelta) -> None:
    """Let time pass for all grants and plans."""
    for name in server.scan_iter("at:quota:*"):
        if server.type(name) == "list":
            earlier = [int(instant) - span // timedelta(microseconds=1) for instant in server.lrange(name, 0, -1)]
            server.delete(name)
            server.rpush(name, *earlier)
