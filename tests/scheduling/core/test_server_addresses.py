"""Each part of an address of Redis or RabbitMQ reaches its clients, or the start refuses it by name."""

import ssl

from django.core.checks import run_checks

from config.environment import environment
from config.settings.connections import build_broker
from scheduling.server_addresses import parse_redis
from tests.support.refused_settings import refusal_of
from tests.support.tables import each_row

CA = __file__  #: a file that can be read
NO_FILE = "/nowhere/ca.pem"
VERIFIED = {"ssl": True, "ssl_cert_reqs": "required", "ssl_check_hostname": True}
UNVERIFIED = {"ssl": True, "ssl_cert_reqs": "none", "ssl_check_hostname": False}


@each_row(
    "url, hosts, options",
    [
        ("redis://", [("127.0.0.1", 6379)], {"db": 0}),
        ("redis://:p%40%3F@h:1/2", [("h", 1)], {"password": "p@?", "db": 2}),
        ("redis://h?username=u&password=p%26&db=3", [("h", 6379)], {"username": "u", "password": "p&", "db": 3}),
        ("redis://[::1]:1", [("::1", 1)], {"db": 0}),
        ("rediss://u:p@h", [("h", 6379)], {"username": "u", "password": "p", "db": 0, **VERIFIED}),
        (f"rediss://h?ssl_ca_certs={CA}", [("h", 6379)], {"db": 0, "ssl_ca_certs": CA, **VERIFIED}),
        ("rediss://h?ssl_cert_reqs=CERT_NONE", [("h", 6379)], {"db": 0, **UNVERIFIED}),
        ("rediss://h?ssl_check_hostname=no", [("h", 6379)], {"db": 0, **VERIFIED, "ssl_check_hostname": False}),
        ("unix://u:p@/run/redis.sock?db=1", [], {"username": "u", "password": "p", "db": 1}),
        ("sentinel://:p@h1/2;sentinel://h2:1?ssl=true", [("h1", 26379), ("h2", 1)],
         {"password": "p", "db": 2, **VERIFIED}),
        ("sentinel://h1?ssl=false", [("h1", 26379)], {"db": 0}),
        ("redis+cluster://h1", [("h1", 6379)], {}),
        ("redis+cluster://u:p%40%2C@h1:1,[::1]:2,[fe80::2]/", [("h1", 1), ("::1", 2), ("fe80::2", 6379)],
         {"username": "u", "password": "p@,"}),
        (f"rediss+cluster://:p,q@h1,10.0.0.2:2?username=u&ssl_ca_certs={CA}", [("h1", 6379), ("10.0.0.2", 2)],
         {"username": "u", "password": "p,q", "ssl_ca_certs": CA, **VERIFIED}),
    ],
)  # fmt: skip
def test_address_becomes_options_of_the_client(url, hosts, options):
    found = parse_redis(url)
    assert (list(found.hosts), found.options) == (hosts, options)


REFUSED = [
    ("rediss://u:hidden@h?ssl_ca_cert=hidden", "“ssl_ca_cert” is not a parameter here; known are"),
    ("redis://u:hidden@h?socket_timeout=3", "“socket_timeout” is not a parameter here"),
    (f"redis://u:hidden@h?ssl_ca_certs={CA}", "“ssl_ca_certs” without TLS: it is rediss://"),
    (f"sentinel://u:hidden@h?ssl_ca_certs={CA}", "“ssl_ca_certs” without TLS"),
    (f"rediss://u:hidden@h?ssl_ca_certs={NO_FILE}", "“ssl_ca_certs” names no file that this user can read"),
    (f"rediss://u:hidden@h?ssl_keyfile={CA}", "“ssl_keyfile” needs ssl_certfile"),
    ("rediss://u:hidden@h?ssl_cert_reqs=hidden", "“ssl_cert_reqs” must be required or none"),
    ("rediss://u:hidden@h?ssl_check_hostname=", "“ssl_check_hostname” has no value"),
    ("sentinel://h1?ssl=hidden", "“ssl” must be true or false"),
    ("sentinel://:hidden@h1;sentinel://:other@h2", "“password” has two values"),
    ("redis://u:hidden@h/hidden", "the database must be a number"),
    ("redis://u:hidden@h1,h2", "must be redis://"),
    # a password with a special character that is not encoded
    *((f"redis://:pa{sign}hidden@h:6379/0", "must be redis://") for sign in "?#/;["),
    ("redis://h1;redis://h2", "must be redis://"),
    ("memory://hidden", "must be redis://"),
]  # fmt: skip


def test_part_that_no_client_could_honour_is_refused_by_name():
    for url, words in REFUSED:
        said = refusal_of(CELERY_BROKER_URL=url)
        assert f"  CELERY_BROKER_URL: Value error, {words}" in said
        assert "hidden" not in said


A_CLUSTER = "a cluster is redis+cluster://user:password@h1:6379,h2:6379, or rediss+cluster:// with TLS"


@each_row(
    "url, words",
    [
        ("cluster://u:hidden@h1:6379;cluster://h2:6379", A_CLUSTER),
        ("redis+cluster://h1;redis+cluster://h2", A_CLUSTER), ("redis+cluster://u:hidden@h1,u:hidden@h2", A_CLUSTER),
        ("redis+cluster://h1,", A_CLUSTER), ("redis+cluster://h1:port,h2", A_CLUSTER),
        ("redis+cluster://::1", A_CLUSTER), ("redis+cluster://h1/2", A_CLUSTER),
        ("redis+cluster://:pa@hidden@h1", A_CLUSTER), ("redis+cluster://h1,h2:65536", "must be redis://"),
        ("redis+cluster://h1,h2?db=0", "“db” is not a parameter here"),
        ("redis+cluster://h1?ssl=true", "“ssl” without TLS: it is rediss://, rediss+cluster://"),
        ("rediss+cluster://h1?ssl=true", "“ssl” is not a parameter here"),
        (f"redis+cluster://h1?ssl_ca_certs={CA}", "“ssl_ca_certs” without TLS"),
    ],
)  # fmt: skip
def test_wrong_address_of_a_cluster_is_refused_by_name(url, words):
    assert f"  AFTERTOUCH_SESSIONS_REDIS_URL: Value error, {words}" in refusal_of(AFTERTOUCH_SESSIONS_REDIS_URL=url)


@each_row(
    "name, text, words",
    [
        *(
            (name, url, "a Redis Cluster holds live chats only; its address is AFTERTOUCH_SESSIONS_REDIS_URL")
            for name in ("REDIS_URL", "CELERY_BROKER_URL")
            for url in ("redis+cluster://u:hidden@h1", "cluster://h1:6379")
        ),
        ("CELERY_BROKER_URL", "amqps://u:hidden@h?ca_certs=hidden", "“ca_certs” is not a parameter here"),
        ("CELERY_BROKER_URL", f"amqp://u:hidden@h?ssl_ca_certs={CA}", "“ssl_ca_certs” without TLS"),
        ("CELERY_BROKER_URL", "amqps://u:pa?hidden@h", "must be redis://"),
        ("CELERY_BROKER_URL", "amqps://u:hidden@h1;amqp://h2", "must be redis://"),
        ("REDIS_URL", "amqp://u:hidden@h", "must be redis://"),
        ("REDIS_URL", "rediss://u:hidden@h?sslmode=hidden", "“sslmode” is not a parameter here"),
        ("AFTERTOUCH_SESSIONS_REDIS_URL", "rediss://u:hidden@h?sslmode=hidden", "“sslmode” is not a parameter here"),
        ("AFTERTOUCH_GATEWAY_REDIS_URL", "rediss://u:hidden@h?sslmode=hidden", "“sslmode” is not a parameter here"),
        ("AFTERTOUCH_SENTINEL_URL_OPTIONS", "user=hidden", "“user” is not a parameter here; known are username"),
        ("AFTERTOUCH_SENTINEL_URL_OPTIONS", f"password=hidden&ssl_ca_certs={CA}", "“ssl_ca_certs” without TLS"),
        ("AFTERTOUCH_SENTINEL_URL_OPTIONS", f"ssl=true&ssl_ca_certs={NO_FILE}", "“ssl_ca_certs” names no file"),
    ],
)
def test_wrong_address_or_option_of_sentinels_is_refused_by_name(name, text, words):
    said = refusal_of(**{name: text})
    assert f"  {name}: Value error, {words}" in said
    assert "hidden" not in said


@each_row(
    "url, address, tls",
    [
        ("rediss://u:p@h", "rediss://u:p@h:6379/0", {"ssl_cert_reqs": "required", "ssl_check_hostname": True}),
        # kombu reads the address of the next Sentinel alone
        ("sentinel://u:p@h1/2;sentinel://h2:1", "sentinel://u:p@h1:26379/2;sentinel://u:p@h2:1/2", False),
        ("unix://:p@/run/a%20b.sock?db=1", "redis+socket://:p@/run/a%20b.sock?virtual_host=1", False),
        ("amqp://", "amqp://", False),
        ("amqps://u:p@h1/v;amqps://u:p@h2/v", "amqps://u:p@h1/v;amqps://u:p@h2/v",
         {"cert_reqs": ssl.CERT_REQUIRED, "server_hostname": None}),
        (f"amqps://h?ssl_ca_certs={CA}&ssl_certfile={CA}&ssl_keyfile={CA}", "amqps://h",
         {"cert_reqs": ssl.CERT_REQUIRED, "server_hostname": None, "ca_certs": CA, "certfile": CA, "keyfile": CA}),
        ("amqps://h?ssl_cert_reqs=none", "amqps://h", {"cert_reqs": ssl.CERT_NONE}),
    ],
)  # fmt: skip
def test_broker_gets_a_plain_address_and_tls_options(url, address, tls):
    assert build_broker(url) == (address, tls)


def test_deploy_check_warns_of_each_unverified_server(monkeypatch, settings):
    unverified = {
        "REDIS_URL": "rediss://h?ssl_cert_reqs=none",
        "CELERY_BROKER_URL": "amqps://h?ssl_check_hostname=false",
        "AFTERTOUCH_SESSIONS_REDIS_URL": "rediss+cluster://h?ssl_cert_reqs=none",
        "AFTERTOUCH_SENTINEL_URL_OPTIONS": "ssl=true&ssl_cert_reqs=none",
    }
    for name in unverified:
        monkeypatch.setenv(name, "ssl=true" if name.endswith("OPTIONS") else "rediss://h")
    assert environment.__wrapped__().unverified_servers == []
    for name, value in unverified.items():
        monkeypatch.setenv(name, value)
    settings.UNVERIFIED_SERVERS = environment.__wrapped__().unverified_servers
    found = [each.msg for each in run_checks(include_deployment_checks=True) if each.id == "aftertouch.W007"]
    assert found == [f"{name} uses TLS and does not verify the server." for name in unverified]
