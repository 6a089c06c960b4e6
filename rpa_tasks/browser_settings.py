"""Check and merge the browser settings of shops and platforms.

Stored values have the names of `SETTINGS` and `SECRETS`, in `browser` and `proxy_secret` of the row. Errors, forms and
files name them `browser.<path>`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any
from urllib.parse import urlsplit

from rpa_tasks.browsers.launch import PROXY_FAILED, LaunchSettings, NoBrowser
from rpa_tasks.models import Platform, Shop
from scheduling.error_text import ErrorText as _
from scheduling.errors import ErrorCollector
from scheduling.models.encrypted import Sealed
from scheduling.policy.send_times import is_time_zone

#: Path below `browser` by stored name.
SETTINGS = {
    "language": "language", "timezone": "timezone", "window": "window", "downloads": "downloads", "flags": "flags",
    "extensions": "extensions",
    "proxy_url": "proxy.url", "cdp_url": "provider.cdp_url",
}  # fmt: skip
SECRETS = {"username": "proxy.username", "password": "proxy.password"}
LISTS = frozenset({"flags", "extensions"})  #: names whose values are lists
SHOP_ID = "{shop_id}"  #: placeholder in the address of a browser elsewhere
OWN = "own"  #: a shop's word against the browser elsewhere of its platform
DIRECT = "direct"  #: a shop's word against the proxy of its platform
LONGEST_SECRET = 255  #: bytes, the limit of SOCKS5
MOST_FLAGS = 20
MOST_EXTENSIONS = 10
MOST_NAMED = 5  #: shops in an error
#: Flags without influence on isolation, profile, debug port and proxy. A name with "=" takes a value.
ALLOWED_FLAGS = frozenset({
    "--user-agent=", "--force-device-scale-factor=", "--force-color-profile=", "--font-render-hinting=",
    "--autoplay-policy=", "--blink-settings=", "--disable-blink-features=", "--enable-blink-features=",
    "--default-background-color=", "--hide-scrollbars", "--start-maximized",
    "--disable-notifications", "--disable-popup-blocking", "--disable-3d-apis", "--disable-webgl",
    "--disable-http2", "--disable-remote-fonts", "--disable-smooth-scrolling", "--force-dark-mode",
    "--force-prefers-reduced-motion",
})  # fmt: skip

_LANGUAGE = re.compile(r"[a-z]{2,3}(-[A-Z][a-z]{3})?(-([A-Z]{2}|[0-9]{3}))?")
_WINDOW = re.compile(r"([1-9][0-9]{2,3})x([1-9][0-9]{2,3})")
_FOLDER = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,63}")
_HOST = re.compile(r"[A-Za-z0-9](?:[A-Za-z0-9.-]{0,251}[A-Za-z0-9])?")


def check_browser_settings(
    values: Mapping[str, Any],
    found: ErrorCollector,
    *,
    is_platform: bool = False,
    stored: Platform | None = None,
    taken: Mapping[str, str] | None = None,
    own: str = "",
    inherited: str = "",
    shops: Iterable[Shop] = (),
    prefix: str = "browser.",
) -> None:
    """Check the values with a name `<prefix><path>`; the others are skipped.

    `stored` is the row of a platform that exists, `shops` are then all shops with their platforms. `taken` maps
    addresses of browsers elsewhere to the shops that use them, of which `own` is this one. `inherited` is the address
    that the shop has without one of its own.
    """
    paths = {name: prefix + path for name, path in (SETTINGS | SECRETS).items()}
    given = {name: values[path] for name, path in paths.items() if values.get(path)}
    problems = _launch_problems(given) | _secret_problems(given)
    if (address := given.get("cdp_url", OWN)) != OWN:
        if is_platform and SHOP_ID not in address:
            problems["cdp_url"] = _("must contain {shop_id}: each shop has a browser of its own")
        else:
            problem = _address_problem(address.replace(SHOP_ID, "s") if is_platform else address, ("http",))
            if problem := problem or (_find_shared_browser(stored, address, shops) if stored else ""):
                problems["cdp_url"] = problem
        for name in given.keys() - {"cdp_url"}:
            problems.setdefault(name, _("has no effect on a browser that runs elsewhere; remove one of the two"))
    other = (taken or {}).get(find_browser_address(given.get("cdp_url", ""), inherited), own)
    if other != own:
        problems.setdefault("cdp_url", _("this browser belongs to %(shop)s; set another one", shop=other))
    if stored and paths["proxy_url"] in values and (exposed := _find_exposed_shops(stored, given.get("proxy_url", ""))):
        problems.setdefault(
            "proxy_url",
            _("would get the own passwords of %(shops)s; remove them from these shops first", shops=exposed),
        )
    for name, message in problems.items():
        found.add(paths[name], message)


def _launch_problems(given: Mapping[str, Any]) -> dict[str, str]:
    problems: dict[str, str] = {}
    if "language" in given and not _LANGUAGE.fullmatch(given["language"]):
        problems["language"] = _("must be a language like zh-CN or pt")
    if "timezone" in given and not is_time_zone(given["timezone"]):
        problems["timezone"] = _("must be a time zone like Asia/Shanghai")
    if "window" in given and not _WINDOW.fullmatch(given["window"]):
        problems["window"] = _("must be a size like 1366x768, from 100 to 9999")
    if "downloads" in given and (not _FOLDER.fullmatch(given["downloads"]) or given["downloads"] == "tmp"):
        problems["downloads"] = _("must be a folder name of letters, digits, “-” and “_”, at most 64, not tmp")
    if "flags" in given and (problem := _flag_problem(given["flags"])):
        problems["flags"] = problem
    if "extensions" in given and (problem := _extension_problem(given["extensions"])):
        problems["extensions"] = problem
    if (
        "proxy_url" in given
        and given["proxy_url"] != DIRECT
        and (problem := _address_problem(given["proxy_url"], ("http", "socks5")))
    ):
        problems["proxy_url"] = problem
    return problems


def _secret_problems(given: Mapping[str, Any]) -> dict[str, str]:
    problems: dict[str, str] = {}
    for name in SECRETS:
        if name in given and (len(given[name].encode()) > LONGEST_SECRET or not given[name].isprintable()):
            problems[name] = _("must have at most %(most)s bytes, without control characters", most=LONGEST_SECRET)
    if "username" in given and ":" in given["username"]:
        problems["username"] = _("must not contain “:”")
    if "password" in given and "username" not in given and "username" not in problems:
        problems["username"] = _("is missing: the password belongs to a user name")
    return problems


def _flag_problem(flags: Any) -> str:
    if not isinstance(flags, list) or len(flags) > MOST_FLAGS:
        return _("must be a list of at most %(most)s flags", most=MOST_FLAGS)
    for flag in flags:
        name, sign, value = flag.partition("=") if isinstance(flag, str) else ("", "", "")
        if name + sign not in ALLOWED_FLAGS or (sign and not value) or not str(flag).isprintable() or len(flag) > 500:
            return _("“%(name)s” is not one of %(known)s", name=str(flag)[:100], known=", ".join(sorted(ALLOWED_FLAGS)))
    return ""


def _extension_problem(names: Any) -> str:
    if not isinstance(names, list) or len(names) > MOST_EXTENSIONS:
        return _("must be a list of at most %(most)s extensions", most=MOST_EXTENSIONS)
    for name in names:
        if not isinstance(name, str) or not _FOLDER.fullmatch(name):
            return _(
                "“%(name)s” is not the name of a folder of letters, digits, “-” and “_”, at most 64",
                name=str(name)[:100],
            )
    return ""


def _address_problem(url: str, schemes: tuple[str, ...]) -> str:
    examples = ", ".join(f"{scheme}://host.example:8080" for scheme in schemes)
    try:
        address = urlsplit(url)
        port = address.port
    except ValueError:
        return _("must be an address like %(known)s", known=examples)
    if address.username is not None or address.password is not None:
        return _("must not have a password; it has fields of its own")
    plain = f"{address.scheme}://{address.netloc}"
    if (
        address.scheme not in schemes
        or not port
        or not _HOST.fullmatch(address.hostname or "")
        or url not in (plain, f"{plain}/")
    ):
        return _("must be an address like %(known)s", known=examples)
    return ""


def normalize_address(url: str) -> str:
    """Return the one text of all addresses of a browser elsewhere that differ in case, port digits and a last “/”.

    Other values stay as they are, for the check. Two names of one host stay different.
    """
    if _address_problem(url.replace(SHOP_ID, "s"), ("http",)):
        return url
    address = urlsplit(url)
    return f"{address.scheme}://{address.hostname}:{address.port}"


def find_browser_address(own: str, template: str, shop_id: str = "") -> str:
    """Return the address of a shop's browser elsewhere, or "". `template` is the platform's address."""
    address = own or template or OWN
    return "" if address == OWN else normalize_address(address.replace(SHOP_ID, shop_id))


def map_browsers_to_shops(shops: Iterable[Shop], templates: Mapping[str, str] | None = None) -> dict[str, str]:
    """Map the address of each browser elsewhere to its shop. The shops come with their platforms.

    `templates` are the addresses of the platforms by key; None: as stored.
    """
    found: dict[str, str] = {}
    for shop in shops:
        stored = shop.platform.browser.get("cdp_url", "")
        template = stored if templates is None else templates.get(shop.platform.key, "")
        if address := find_browser_address(shop.browser.get("cdp_url", ""), template, shop.shop_id):
            found[address] = f"{shop.platform.key}/{shop.shop_id}"
    return found


def find_shared_browsers(shops: Iterable[Shop], templates: Mapping[str, str]) -> Iterator[tuple[Shop, str]]:
    """Yield each shop that would get the browser of an earlier one, with the error. `templates` as for the map."""
    users: dict[str, str] = {}
    for shop in shops:
        for address, name in map_browsers_to_shops([shop], templates).items():
            if (other := users.setdefault(address, name)) != name:
                yield (
                    shop,
                    _("would give the browser of %(other)s to %(shop)s too; set another one", other=other, shop=name),
                )


def _find_shared_browser(platform: Platform, template: str, shops: Iterable[Shop]) -> str:
    """Return why the address may not be that of the platform: two shops would get one browser. Else ""."""
    known = sorted(shops, key=lambda shop: shop.platform_id == platform.pk)  # its own last: others stay as they are
    templates = {shop.platform.key: shop.platform.browser.get("cdp_url", "") for shop in known}
    found = find_shared_browsers(known, templates | {platform.key: template})
    return next((problem for shop, problem in found if shop.platform_id == platform.pk), "")


def find_shop_address(shop: Shop) -> str:
    """Return the address of the browser elsewhere that a shop uses, or "". The shop comes with its platform."""
    own, template = shop.browser.get("cdp_url", ""), shop.platform.browser.get("cdp_url", "")
    return find_browser_address(own, template, shop.shop_id)


def uses_browser_elsewhere(shop: Shop) -> bool:
    """Return whether the shop's browser, with its login, runs elsewhere. The shop comes with its platform."""
    return bool(find_shop_address(shop))


def needs_new_password(row: Shop | Platform, proxy_url: str) -> bool:
    """Return whether the stored password may not be kept: it would be sent to another address than it was given for."""
    return bool(row.proxy_secret) and proxy_url != row.browser.get("proxy_url", "")


def _find_exposed_shops(platform: Platform, proxy_url: str) -> str:
    """Name shops whose own password was given for the former proxy of the platform, and would be sent to this one."""
    if proxy_url in ("", DIRECT, platform.browser.get("proxy_url")):
        return ""
    shops = platform.shops.exclude(proxy_secret={}).order_by("shop_id").values_list("shop_id", "browser")
    exposed = [shop_id for shop_id, browser in shops if not browser.get("proxy_url")]
    names = ", ".join(exposed[:MOST_NAMED])
    more = len(exposed) - MOST_NAMED
    return _("%(names)s and %(count)s more", names=names, count=more) if more > 0 else names


def resolve_launch_settings(shop: Shop) -> LaunchSettings:
    """Return the settings of the shop's browser; the shop comes with its platform.

    A value of the shop precedes the platform's. The platform's password is never sent to a proxy that the shop names.
    Raises: `NoBrowser` if this node cannot decrypt the password, or the shop's proxy would not be used.
    """
    merged = {**_set_values(shop.platform.browser), **_set_values(shop.browser)}
    merged.pop("cdp_url", None)
    if address := find_shop_address(shop):
        if shop.browser.get("proxy_url", DIRECT) != DIRECT:
            hint = "Set provider.cdp_url of the shop to own, or remove its proxy."
            raise NoBrowser(PROXY_FAILED, f"The browser of its platform runs elsewhere, without this proxy. {hint}")
        return LaunchSettings(cdp_url=address)
    rows: list[Shop | Platform] = [shop] if shop.browser.get("proxy_url") else [shop.platform, shop]
    if merged.get("proxy_url") in (None, DIRECT):
        merged.pop("proxy_url", None)
        rows = []
    for row in rows:
        if isinstance(row.proxy_secret, Sealed):
            hint = "Set AFTERTOUCH_RPA_SECRETS_KEYS on all machines, then run manage.py rotate_secrets."
            raise NoBrowser(PROXY_FAILED, f"The password of the proxy cannot be decrypted here. {hint}")
        if row.proxy_secret.get("username"):
            merged |= {"username": row.proxy_secret["username"], "password": row.proxy_secret.get("password", "")}
    merged |= {name: tuple(merged.get(name, ())) for name in LISTS}
    return LaunchSettings(**merged)


def _set_values(browser: Mapping[str, Any]) -> dict[str, Any]:
    return {name: browser[name] for name in SETTINGS if browser.get(name)}
