from base64 import b64decode
from ipaddress import ip_address

import pytest

from scheduling.channels.base import DestinationRefused
from scheduling.channels.ssrf import PrivateHosts, check_proxy, check_url, is_public, parse_proxy
from tests.support.tables import each_row

NOTHING = PrivateHosts()

HOSTILE = [
    ("http://example.com/hook", "scheme"),
    ("file:///etc/passwd", "bad_url"),
    ("gopher://127.0.0.1:6379/_FLUSHALL", "scheme"),
    ("example.com", "bad_url"),
    ("", "bad_url"),
    ("https://", "bad_url"),
    ("https://" + "a" * 3000 + ".com/", "bad_url"),
    ("https://user:pw@example.com/", "bad_url"),
    ("https://example.com@127.0.0.1/", "bad_url"),
    ("https://127.0.0.1%2f@example.com/", "bad_url"),
    ("https://example.com\\@127.0.0.1/", "bad_url"),
    ("https://exa mple.com/", "bad_url"),
    ("https://example.com/\r\nX-Evil: 1", "bad_url"),
    ("https://example.com/\x00", "bad_url"),
    ("https://example.com:99999/", "bad_url"),
    ("https://127.0.0.1/", "private_address"),
    ("https://127.1/", "bad_url"),
    ("https://2130706433/", "bad_url"),
    ("https://0x7f000001/", "bad_url"),
    ("https://0177.0.0.1/", "bad_url"),
    ("https://127.0.0.1./", "bad_url"),
    ("https://１２７.0.0.1/", "private_address"),
    ("https://0.0.0.0/", "private_address"),
    ("https://10.1.2.3/", "private_address"),
    ("https://100.100.100.200/latest/meta-data", "private_address"),
    ("https://169.254.169.254/latest/meta-data", "private_address"),
    ("https://168.63.129.16/", "private_address"),
    ("https://224.0.0.1/", "private_address"),
    ("https://[::1]/", "private_address"),
    ("https://[::ffff:127.0.0.1]/", "private_address"),
    ("https://[::ffff:8.8.8.8]/", "private_address"),
    ("https://[::7f00:1]/", "private_address"),
    ("https://[64:ff9b::a9fe:a9fe]/", "private_address"),
    ("https://[64:ff9b:1::1]/", "private_address"),
    ("https://[2002:7f00:1::1]/", "private_address"),
    ("https://[2001:0:4136:e378:8000:63bf:3fff:fdd2]/", "private_address"),
    ("https://[fe80::1]/", "private_address"),
    ("https://[fe80::1%25eth0]/", "bad_url"),
    ("https://[fd00::1]/", "private_address"),
    ("https://[::1", "bad_url"),
    ("https://localhost/", "private_address"),
    ("https://LOCALHOST./", "private_address"),
    ("https://redis.localhost/", "private_address"),
    ("https://ex%61mple.com/", "bad_url"),
]


@each_row("url, reason", HOSTILE)
def test_hostile_url_is_refused(url, reason):
    with pytest.raises(DestinationRefused) as refused:
        check_url(url, NOTHING)

    assert refused.value.reason == reason
    assert url == "" or url not in str(refused.value), "a URL is a secret"


@each_row(
    "url",
    [
        "https://example.com/hook",
        "https://example.com:8443/a/b?c=d",
        "https://EXAMPLE.com./",
        "https://8.8.8.8/",
        "https://[2606:4700:4700::1111]/",
        "https://a_b.example.com/",
        "https://0x7f.example.com/",
        "https://127.0.0.1.example.com/",
    ],
)
def test_public_url_is_admitted(url):
    assert check_url(url, NOTHING).scheme == "https"


def test_ascii_url_is_kept_byte_for_byte():
    url = "https://example.com/a%2Fb/../c?sign=a%2Fb%2Bc%3D&x='"

    assert str(check_url(url, NOTHING)) == url
    assert str(check_url(url + "#part", NOTHING)) == url


def test_chinese_host_is_encoded_once():
    assert str(check_url("https://例子.测试/路?问=答", NOTHING)).startswith(
        "https://xn--fsqu00a.xn--0zwm56d/%E8%B7%AF?"
    )


@each_row(
    "text", ["64:ff9b::808:808", "1.1.1.1", "223.5.5.5", "2400:3200::1", "192.0.1.1", "172.32.0.1", "100.128.0.1"]
)
def test_public_address_is_public(text):
    assert is_public(ip_address(text))


@each_row(
    "entry, url, opened",
    [
        ("hooks.internal", "http://hooks.internal/x", True),
        ("hooks.internal", "http://evil-hooks.internal/x", False),
        ("hooks.internal:8080", "http://hooks.internal:8080/x", True),
        ("hooks.internal:8080", "http://hooks.internal/x", False),
        ("10.0.0.0/8", "http://10.9.8.7/x", True),
        ("10.0.0.0/8", "http://11.9.8.7/x", False),
        ("127.0.0.1:8000", "http://127.0.0.1:8000/x", True),
        ("127.0.0.1:8000", "http://127.0.0.1:8001/x", False),
        ("127.0.0.1", "http://2130706433/x", False),
        ("[::1]:80", "http://[::1]/x", True),
        ("[::1]:80", "http://[0:0::1]/x", True),
        ("fd00::/8", "https://[fd00::1]/x", True),
    ],
)
def test_private_hosts_open_only_what_they_name(entry, url, opened):
    private = PrivateHosts.parse([entry])

    if opened:
        assert check_url(url, private)
    else:
        with pytest.raises(DestinationRefused):
            check_url(url, private)


@each_row("entry", ["", "a b", "http://x", "host:port", "user@host", "x/y", "-x", "host:99999", "10.0.0.0/99"])
def test_invalid_private_host_is_refused(entry):
    with pytest.raises(ValueError, match="AFTERTOUCH_ALLOWED_PRIVATE_HOSTS"):
        PrivateHosts.parse([entry])


@each_row(
    "text, url, login",
    [
        ("http://proxy.example.com:3128", "http://proxy.example.com:3128", ""),
        ("HTTPS://Proxy:443/", "https://proxy", ""),
        ("http://buyer:s%40cret@10.0.0.1:3128", "http://10.0.0.1:3128", "buyer:s@cret"),
        ("http://客服:密码@[fd00::1]:80", "http://[fd00::1]", "客服:密码"),
        ("http://buyer@proxy:3128", "http://proxy:3128", "buyer:"),
    ],
)
def test_proxy_is_parsed(text, url, login):
    proxy = parse_proxy(text)
    given = proxy.headers.get("Proxy-Authorization", "").removeprefix("Basic ")
    assert (str(proxy.url), b64decode(given).decode()) == (url, login)
    assert "cret" not in repr(proxy)


@each_row(
    "text",
    [
        "proxy:3128", "//proxy:3128", "socks5://proxy:1080", "http://proxy", "http://proxy:0", "http://proxy:99999",
        "http://:3128", "http://proxy:3128/path", "http://proxy:3128?q", "http://u:s3cret#1@proxy:3128",
        "http://u:s3cret/1@proxy:3128", "http://u%3Ar:s3cret@proxy:3128", "http://2130706433:3128", "http://a b:3128",
        "http://u:s3cret\r\n@proxy:3128", "http://" + "a" * 2_100 + ":3128", "http://u:s3cret@proxy:port",
    ],
)  # fmt: skip
def test_invalid_proxy_is_refused_without_its_password(text):
    with pytest.raises(DestinationRefused) as failure:
        check_proxy(text, NOTHING)
    assert failure.value.reason == "bad_url"
    assert "s3cret" not in str(failure.value)


@each_row("host", ["10.0.0.1", "[::1]", "localhost", "a.localhost", "169.254.169.254"])
def test_private_proxy_of_a_channel_needs_permission_or_that_of_the_installation(host):
    text = f"http://{host}:3128"
    with pytest.raises(DestinationRefused) as failure:
        check_proxy(text, NOTHING)
    assert failure.value.reason == "private_address"
    assert check_proxy(text, PrivateHosts.parse([f"{host}:3128"]))
    installation = NOTHING.with_proxy(f"https://u:p@{host}:3128")
    assert check_proxy(text, installation)
    with pytest.raises(DestinationRefused):
        check_proxy(f"http://{host}:80", installation)
