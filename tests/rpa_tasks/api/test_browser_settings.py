"""Browser settings of shops and platforms: precedence, validation, files, forms and the API."""

import re

import pytest
from django.db import IntegrityError, connection, transaction
from django.utils import translation

from rpa_tasks.admin.platform import PlatformForm
from rpa_tasks.admin.shop import ShopForm
from rpa_tasks.browser_settings import check_browser_settings, resolve_launch_settings
from rpa_tasks.browsers.launch import LaunchSettings, NoBrowser
from rpa_tasks.models import Platform, Shop
from scheduling.errors import ErrorCollector
from scheduling.models import encrypted
from tests.rpa_tasks.api.conftest import Market
from tests.support.tables import each_row

pytestmark = pytest.mark.django_db
SECRET = {"username": "u-platform", "password": "p-platform"}
FILE = """
platforms:
  - key: pdd
    browser: {language: zh-CN, proxy: {url: "http://gateway.example:8080", username: gate, password: "pass:1"}}
shops:
  - platform: pdd
    shop_id: s1
    browser:
      timezone: Asia/Shanghai
      window: 1366x768
      downloads: exports
      flags: ["--user-agent=A, B", --hide-scrollbars]
      proxy: {url: direct}
"""


def resolve(platform, shop, *secrets):
    market = Market()
    market.pdd.browser, market.pdd.proxy_secret = platform, secrets[0] if secrets else {}
    market.pdd.save()
    market.s1.browser, market.s1.proxy_secret = shop, secrets[1] if secrets else {}
    market.s1.save()
    return resolve_launch_settings(Shop.objects.select_related("platform").get(pk=market.s1.pk))


@each_row(
    "shop, secret, expected",
    [
        ({}, {}, ("http://p:1", "u-platform", "p-platform")),
        ({}, {"username": "u", "password": "p"}, ("http://p:1", "u", "p")),
        ({}, {"username": "u"}, ("http://p:1", "u", "")),
        ({"proxy_url": "socks5://s:2"}, {}, ("socks5://s:2", "", "")),
        ({"proxy_url": "socks5://s:2"}, {"username": "u", "password": "p"}, ("socks5://s:2", "u", "p")),
        ({"proxy_url": "direct"}, {"username": "u", "password": "p"}, ("", "", "")),
    ],
)
def test_password_of_platform_goes_only_to_its_proxy(shop, secret, expected):
    found = resolve({"proxy_url": "http://p:1"}, shop, SECRET, secret)
    assert (found.proxy_url, found.username, found.password) == expected


def test_password_that_node_cannot_decrypt_is_named(settings):
    settings.AFTERTOUCH_RPA_SECRETS_KEYS = ["k" * 43]
    encrypted.build_cipher.cache_clear()
    try:
        market = Market()
        market.s1.browser, market.s1.proxy_secret = {"proxy_url": "http://p:1"}, {"username": "u", "password": "p"}
        market.s1.save()
        # An execution node has these keys, and no other key of the web process.
        for keys in (["k" * 43], ["n" * 43, "k" * 43]):
            settings.SECRET_KEY, settings.AFTERTOUCH_RPA_SECRETS_KEYS = "node", keys
            encrypted.build_cipher.cache_clear()
            assert resolve_launch_settings(Shop.objects.select_related("platform").get(shop_id="s1")).password == "p"
        settings.AFTERTOUCH_RPA_SECRETS_KEYS = []
        encrypted.build_cipher.cache_clear()
        with pytest.raises(NoBrowser, match="AFTERTOUCH_RPA_SECRETS_KEYS"):
            resolve_launch_settings(Shop.objects.select_related("platform").get(shop_id="s1"))
        Shop.objects.filter(shop_id="s2").update(browser={"proxy_url": "http://p:1"})  # without a password
        assert resolve_launch_settings(Shop.objects.select_related("platform").get(shop_id="s2")).proxy_url
    finally:
        encrypted.build_cipher.cache_clear()


@each_row(
    "path, bad",
    [
        *(("language", each) for each in ("chinese", "zh_CN", "zh-CN --x", "1")),
        *(("timezone", each) for each in ("Asia/Peking", "../etc/passwd", "UTC+8")),
        *(("window", each) for each in ("10x10", "1366", "1366,768", "99999x1000")),
        *(("downloads", each) for each in ("../up", "a/b", "/data", "tmp", ".hidden")),
        *(("flags", [each]) for each in (
            "--no-sandbox", "--proxy-server=x", "--user-data-dir=/", "--remote-debugging-port=1", "--user-agent", "x",
            "--load-extension=/", "--hide-scrollbars=1", "--renderer-cmd-prefix=sh", "--user-agent=a\nb", 7,
        )),
        *(("extensions", each) for each in (["../up"], ["a/b"], ["a,b"], [""], [7], "a", ["a"] * 11)),
        *(("proxy.url", each) for each in (
            "proxy:8080", "https://p:1", "http://p", "http://u:p@p:1", "http://p:1/path", "http://p:1?q", "socks4://p:1",
            "http://p:99999", "http://a b:1", "http://-p:1",
        )),
        *(("provider.cdp_url", each) for each in ("ws://x:1", "http://x", "http://x:1/p", "http://u:p@x:1", "http://{shop_id}:1")),
        ("proxy.username", "a:b"), ("proxy.username", "a\nb"), ("proxy.username", "é" * 128),
    ],
)  # fmt: skip
def test_bad_setting_is_refused_by_name(path, bad):
    found = ErrorCollector()
    check_browser_settings({f"browser.{path}": bad}, found)
    assert [each.field for each in found.errors] == [f"browser.{path}"]


@each_row(
    "platform, shop, expected",
    [
        (
            {"language": "en-US", "window": "800x600", "flags": ["--hide-scrollbars"]},
            {"language": "zh-CN"},
            LaunchSettings(language="zh-CN", window="800x600", flags=("--hide-scrollbars",)),
        ),
        ({"cdp_url": "http://b-{shop_id}:9222"}, {}, LaunchSettings(cdp_url="http://b-s1:9222")),
        ({"cdp_url": "http://b-{shop_id}:9222"}, {"cdp_url": "http://x:1"}, LaunchSettings(cdp_url="http://x:1")),
        (
            {"cdp_url": "http://b-{shop_id}:9222", "window": "800x600"},
            {"cdp_url": "own"},
            LaunchSettings(window="800x600"),
        ),
        ({"proxy_url": "http://p:1"}, {"cdp_url": "http://x:1"}, LaunchSettings(cdp_url="http://x:1")),
    ],
)
def test_setting_of_shop_precedes_platform(platform, shop, expected):
    assert resolve(platform, shop) == expected


def test_proxy_of_shop_is_not_lost_on_browser_elsewhere():
    with pytest.raises(NoBrowser, match="own"):
        resolve({"cdp_url": "http://b-{shop_id}:9222"}, {"proxy_url": "http://p:1"})


def test_browser_elsewhere_belongs_to_one_shop(market):
    market.s2.browser = {"cdp_url": "http://x:1"}
    market.s2.save()
    form = fill(market.s1, browser_cdp_url="http://x:1")
    assert set(form.errors) == {"browser_cdp_url"}
    assert "pdd/s2" in str(form.errors)
    market.s1.browser = {"cdp_url": "http://x:1"}
    with pytest.raises(IntegrityError), transaction.atomic():
        market.s1.save()
    for shop in (market.s1, market.s2):
        shop.browser = {"cdp_url": "own"}
        shop.save()


def test_platform_cannot_share_a_browser():
    found = ErrorCollector()
    check_browser_settings(
        {"browser.provider.cdp_url": "http://x:1", "browser.window": "800x600"}, found, is_platform=True
    )
    assert {each.field for each in found.errors} == {"browser.provider.cdp_url", "browser.window"}


TEMPLATE = {"cdp_url": "http://b-{shop_id}:9222"}


@each_row("address", ["http://h:1/", "http://H:1", "http://h:01"])
def test_other_text_of_one_address_is_the_same_browser(market, address):
    found = ErrorCollector()
    check_browser_settings({"browser.provider.cdp_url": address}, found, taken={"http://h:1": "pdd/s2"})
    assert [each.field for each in found.errors] == ["browser.provider.cdp_url"]
    form = fill(market.s1, browser_cdp_url=address)
    assert form.is_valid(), form.errors
    form.save()
    assert Shop.objects.get(pk=market.s1.pk).browser == {"cdp_url": "http://h:1"}


def test_file_stores_one_text_of_an_address(apply, export):
    text = FILE.replace("proxy: {url: direct}", "provider: {cdp_url: 'http://H:01/'}").split("      timezone")[0]
    text += "      provider: {cdp_url: 'http://H:01/'}\n"
    apply(text)
    assert Shop.objects.get().browser == {"cdp_url": "http://h:1"}
    assert apply(text) == "no changes\n"


def test_shop_cannot_name_the_browser_that_a_template_gives_to_another(market, refusal_of):
    Platform.objects.filter(pk=market.pdd.pk).update(browser=TEMPLATE)
    market.s1.platform.refresh_from_db()
    assert set(fill(market.s1, browser_cdp_url="http://B-S2:9222").errors) == {"browser_cdp_url"}
    assert fill(market.s1, browser_cdp_url="http://b-s1:9222").is_valid()
    shops = "shops:\n  - {platform: pdd, shop_id: s1, browser: {provider: {cdp_url: 'http://b-s2:9222'}}}\n"
    refused = refusal_of(shops + "  - {platform: pdd, shop_id: s2}\n")
    assert any("shops[1].browser.provider.cdp_url" in line for line in refused)


def test_shop_cannot_inherit_the_browser_of_another(market):
    Platform.objects.filter(pk=market.pdd.pk).update(browser=TEMPLATE)
    other = Platform.objects.create(key="temu")
    Shop.objects.create(platform=other, shop_id="x", browser={"cdp_url": "http://b-s1:9222"})
    market.s1.refresh_from_db()
    assert "temu/x" in str(fill(market.s1, browser_cdp_url="").errors)
    assert fill(market.s1, browser_cdp_url="own").is_valid()


def test_platform_cannot_give_the_browser_of_another_shop(market, refusal_of):
    other = Platform.objects.create(key="temu", browser=TEMPLATE)
    Shop.objects.create(platform=other, shop_id="s2")
    found = ErrorCollector()
    shops = Shop.objects.select_related("platform")
    given = {"browser.provider.cdp_url": "http://B-{shop_id}:9222"}
    check_browser_settings(given, found, is_platform=True, stored=market.pdd, shops=shops)
    assert "temu/s2" in str(found.errors)
    entry = "  - {key: %s, browser: {provider: {cdp_url: 'http://b-{shop_id}:9222'}}}\n"
    text = "platforms:\n" + entry % "pdd" + entry % "temu"
    assert any("browser.provider.cdp_url" in line for line in refusal_of(text))


# --- the file ---------------------------------------------------------------------------------------------------------


def test_file_stores_and_exports_browser_settings(apply, export):
    apply(FILE)
    shop = Shop.objects.select_related("platform").get()
    assert shop.platform.proxy_secret == {"username": "gate", "password": "pass:1"}
    assert shop.browser["flags"] == ["--user-agent=A, B", "--hide-scrollbars"]
    text = export()
    assert "pass:1" not in text
    assert text.count("(kept)") == 2
    assert apply(text) == "no changes\n"
    assert export() == text
    with connection.cursor() as cursor:
        cursor.execute("SELECT proxy_secret FROM rpa_tasks_platform")
        assert "pass" not in cursor.fetchone()[0]


def test_changed_password_is_hidden_in_difference(apply):
    apply(FILE)
    said = apply(FILE.replace("pass:1", "pass:2").replace("1366x768", "1280x720"))
    assert "browser.proxy.password: (secret) → (secret)" in said
    assert "browser.window: 1366x768 → 1280x720" in said
    assert Shop.objects.get().platform.proxy_secret["password"] == "pass:2"


@each_row("secret", ["username: gate", 'password: "pass:1"'])
def test_file_keeps_no_password_for_another_proxy(apply, export, refusal_of, secret):
    apply(FILE)
    other = FILE.replace("gateway.example", "evil.example").replace(secret, f"{secret.partition(':')[0]}: (kept)")
    problem = "browser.proxy.password: must be entered with the user name for another proxy"
    assert refusal_of(other)[0] == f"platforms[0].{problem}"
    assert refusal_of(export().replace("gateway.example", "evil.example"))[0] == f"platforms[0].{problem}"
    apply(FILE.replace("gateway.example", "other.example"))
    assert "pass:1" not in export()


OWN_PASSWORD = FILE.replace("{url: direct}", '{username: u, password: "own:1"}')


def test_file_sends_no_password_of_a_shop_to_another_proxy(apply, refusal_of):
    apply(OWN_PASSWORD)
    other = OWN_PASSWORD.replace("gateway.example", "evil.example")
    problem = "would get the own passwords of s1; remove them from these shops first"
    assert refusal_of(other)[0] == f"platforms[0].browser.proxy.url: {problem}"
    apply(OWN_PASSWORD.replace("http://gateway.example:8080", "direct"))
    assert resolve_launch_settings(Shop.objects.select_related("platform").get()).password == ""
    assert refusal_of(other), "the password still waits for the former proxy"
    own_proxy = ("{username: u", '{url: "http://gateway.example:8080", username: u')
    apply(OWN_PASSWORD.replace("http://gateway.example:8080", "direct").replace(*own_proxy))
    apply(other.replace(*own_proxy))


def test_file_names_each_bad_browser_setting(refusal_of):
    def list_paths(text):
        return {line.partition(": ")[0] for line in refusal_of(text)}

    assert "platforms[0].browser.proxy.password" in list_paths(FILE.replace("pass:1", "(kept)"))
    assert "platforms[0].browser.language" in list_paths(FILE.replace("zh-CN", "klingon!"))
    shops = list_paths(FILE.replace("1366x768", "big").replace("--hide-scrollbars", "--no-sandbox"))
    assert {"shops[0].browser.window", "shops[0].browser.flags"} <= shops


# --- the form ---------------------------------------------------------------------------------------------------------


def fill(row, form_class=ShopForm, **changes):
    row = type(row)._default_manager.get(pk=row.pk)
    form = form_class(instance=row)
    shown = {name: form.get_initial_for_field(field, name) for name, field in form.fields.items()}
    data = {name: form.fields[name].prepare_value(value) for name, value in shown.items() if value not in (None, False)}
    return form_class({**data, **changes}, instance=row)


def test_form_stores_settings_and_keeps_password(market):
    given = {
        "browser_proxy_url": "http://p:1",
        "secret_username": "u",
        "secret_password": "p",
        "browser_window": "800x600",
    }
    first = fill(market.s1, **given)
    assert first.is_valid(), first.errors
    first.save()
    shop = Shop.objects.get(pk=market.s1.pk)
    assert (shop.browser, shop.proxy_secret) == (
        {"proxy_url": "http://p:1", "window": "800x600"}, {"username": "u", "password": "p"},
    )  # fmt: skip

    again = fill(shop, browser_window="", browser_flags="--user-agent=A, B\n--hide-scrollbars")
    assert again.is_valid(), again.errors
    again.save()
    shop = Shop.objects.get(pk=market.s1.pk)
    assert shop.browser == {"proxy_url": "http://p:1", "flags": ["--user-agent=A, B", "--hide-scrollbars"]}
    assert shop.proxy_secret == {"username": "u", "password": "p"}
    assert "secret" not in fill(shop).fields["secret_password"].widget.attrs.get("value", "")


def test_form_keeps_no_password_for_another_proxy(market):
    market.s1.browser, market.s1.proxy_secret = {"proxy_url": "http://p:1"}, {"username": "u", "password": "p"}
    market.s1.save()
    form = fill(market.s1, browser_proxy_url="http://evil:1")
    assert set(form.errors) == {"secret_password"}
    assert fill(market.s1, browser_proxy_url="http://q:1", secret_username="-", secret_password="-").is_valid()


def test_form_sends_no_password_of_a_shop_to_another_proxy(market):
    market.pdd.browser, market.s1.proxy_secret = {"proxy_url": "http://p:1"}, {"username": "u", "password": "p"}
    market.pdd.save()
    market.s1.save()
    assert fill(market.pdd, PlatformForm, browser_language="en-US").is_valid()
    assert set(fill(market.pdd, PlatformForm, browser_proxy_url="http://evil:1").errors) == {"browser_proxy_url"}


def test_chinese_page_shows_no_english_in_an_error(market):
    market.pdd.browser = {"proxy_url": "http://p:1"}
    market.pdd.save()
    for number in range(7):
        Shop.objects.create(platform=market.pdd, shop_id=f"x{number}", proxy_secret={"username": "u", "password": "p"})
    with translation.override("zh-hans"):
        exposed = fill(market.pdd, PlatformForm, browser_proxy_url="http://evil:1").errors["browser_proxy_url"]
        address = fill(market.s1, browser_proxy_url="ftp://p:1").errors["browser_proxy_url"]
    assert "x0, x1, x2, x3, x4 等，另有 2 个" in exposed[0]
    assert address[0].endswith("必须是地址，例如 http://host.example:8080, socks5://host.example:8080")


def test_form_names_bad_settings(market):
    for flags in ("--no-sandbox", "--hide-scrollbars\0"):
        form = fill(market.s1, browser_language="x", browser_flags=flags, secret_password="p")
        assert set(form.errors) == {"browser_language", "browser_flags", "secret_username"}


# --- the API ----------------------------------------------------------------------------------------------------------


@pytest.mark.django_db(transaction=True)
@each_row("path", ["/rpa/shops/pdd/s1/browser", "/rpa/platforms/pdd/browser"])
def test_api_replaces_settings_without_showing_password(api, path):
    proxy = {"url": "http://p:1", "username": "u", "password": "p4ss"}
    answer = api("PUT", path, {"timezone": "Asia/Shanghai", "proxy": proxy})
    assert answer.status_code == 200, answer.text
    shown = api.get(path).json()
    assert (shown["timezone"], shown["proxy"]) == ("Asia/Shanghai", {"url": "http://p:1", "has_password": True})
    assert not re.search("p4ss", answer.text + api.get(path).text)

    assert api("PUT", path, {"proxy": {"url": "http://p:1"}}).json()["proxy"]["has_password"]
    moved = api("PUT", path, {"proxy": {"url": "http://evil:1"}})
    assert (moved.status_code, moved.json()["errors"][0]["field"]) == (422, "proxy.password")
    assert not api("PUT", path, {"proxy": {"url": "http://q:1", "username": "", "password": ""}}).json()["proxy"][
        "has_password"
    ]


@pytest.mark.django_db(transaction=True)
def test_api_names_each_bad_setting(api):
    body = {"language": "x", "flags": ["--no-sandbox"], "proxy": {"url": "ftp://p:1", "password": "p"}}
    answer = api("PUT", "/rpa/shops/pdd/s1/browser", body)
    fields = {each["field"] for each in answer.json()["errors"]}
    assert (answer.status_code, fields) == (422, {"language", "flags", "proxy.url", "proxy.username"})
    assert api.get("/rpa/shops/pdd/none/browser").status_code == 404


@pytest.mark.django_db(transaction=True)
def test_api_sends_no_password_of_a_shop_to_another_proxy(api):
    platform = "/rpa/platforms/pdd/browser"
    assert api("PUT", platform, {"proxy": {"url": "http://p:1"}}).status_code == 200
    assert api("PUT", "/rpa/shops/pdd/s1/browser", {"proxy": {"username": "u", "password": "p"}}).status_code == 200
    moved = api("PUT", platform, {"proxy": {"url": "http://evil:1"}})
    assert (moved.status_code, moved.json()["errors"][0]["field"]) == (422, "proxy.url")
    assert api("PUT", "/rpa/shops/pdd/s1/browser", {"proxy": {"username": "", "password": ""}}).status_code == 200
    assert api("PUT", platform, {"proxy": {"url": "http://evil:1"}}).status_code == 200
