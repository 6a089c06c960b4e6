"""Read and set the browser settings of platforms and shops."""

from __future__ import annotations

from typing import Any

from django.db import transaction
from django.db.models import Model
from django.http import HttpRequest
from ninja import Path, Router, Schema

from rpa_tasks.api.jobs import PROBLEMS, READ, ShortText
from rpa_tasks.browser_settings import (
    SECRETS,
    SETTINGS,
    check_browser_settings,
    find_browser_address,
    map_browsers_to_shops,
    needs_new_password,
    normalize_address,
)
from rpa_tasks.models import Platform, Shop
from scheduling import sql
from scheduling.api.auth import ApiKeyAuth, build_api_key_actor
from scheduling.api.schemas import ProblemOut, Request, Text
from scheduling.configuration.file.section import put_value
from scheduling.errors import ErrorCollector, InvalidInput, NotFound
from scheduling.models.encrypted import Sealed
from scheduling.models.versioned import lock_for_write

router = Router(tags=["RPA"], auth=READ)
CONFIGURE = ApiKeyAuth("rpa.configure")  #: a proxy or a browser elsewhere sees what its shop sends


class ProxyIn(Request):
    url: ShortText = ""
    #: Absent: the stored one stays, if the address is the same.
    username: ShortText | None = None
    password: ShortText | None = None


class ProviderIn(Request):
    #: A browser that runs elsewhere, such as `http://10.0.0.5:9222`.
    cdp_url: ShortText = ""


class BrowserIn(Request):
    language: ShortText = ""
    timezone: ShortText = ""
    window: ShortText = ""
    downloads: ShortText = ""
    flags: list[Text] = []
    #: Names of folders in `AFTERTOUCH_RPA_EXTENSIONS_DIR` of the execution nodes.
    extensions: list[Text] = []
    proxy: ProxyIn = ProxyIn()
    provider: ProviderIn = ProviderIn()


class ProxyOut(Schema):
    url: str = ""
    has_password: bool


class ProviderOut(Schema):
    cdp_url: str = ""


class BrowserOut(Schema):
    language: str = ""
    timezone: str = ""
    window: str = ""
    downloads: str = ""
    flags: list[str] = []
    extensions: list[str] = []
    proxy: ProxyOut
    provider: ProviderOut = ProviderOut()


@router.get("/rpa/platforms/{platform}/browser", response={200: BrowserOut, PROBLEMS: ProblemOut})
def get_platform_browser(request: HttpRequest, platform: Path[Text]) -> dict[str, Any]:
    """Return the browser settings of the platform, without user name and password of the proxy."""
    return _serialize_browser(_find_row(Platform, key=platform))


@router.put("/rpa/platforms/{platform}/browser", auth=CONFIGURE, response={200: BrowserOut, PROBLEMS: ProblemOut})
def put_platform_browser(request: HttpRequest, platform: Path[Text], wish: BrowserIn) -> dict[str, Any]:
    """Replace the browser settings of the platform. A value of a shop precedes them."""
    return _replace_settings(request, Platform, wish, key=platform)


@router.get("/rpa/shops/{platform}/{shop_id}/browser", response={200: BrowserOut, PROBLEMS: ProblemOut})
def get_shop_browser(request: HttpRequest, platform: Path[Text], shop_id: Path[Text]) -> dict[str, Any]:
    """Return the shop's own browser settings, without user name and password of the proxy."""
    return _serialize_browser(_find_row(Shop, platform__key=platform, shop_id=shop_id))


@router.put("/rpa/shops/{platform}/{shop_id}/browser", auth=CONFIGURE, response={200: BrowserOut, PROBLEMS: ProblemOut})
def put_shop_browser(
    request: HttpRequest, platform: Path[Text], shop_id: Path[Text], wish: BrowserIn
) -> dict[str, Any]:
    """Replace the shop's own browser settings. The next run starts a browser with them."""
    return _replace_settings(request, Shop, wish, platform__key=platform, shop_id=shop_id)


def _find_row(model: type[Model], rows: Any = None, **key: str) -> Any:
    row = (model._default_manager.all() if rows is None else rows).filter(retired_at=None, **key).first()
    if row is None:
        raise NotFound(f"There is no {model._meta.model_name} {'/'.join(key.values())}.")
    return row


def _replace_settings(request: HttpRequest, model: type[Model], wish: BrowserIn, **key: str) -> dict[str, Any]:
    given = wish.model_dump()
    proxy, provider = given.pop("proxy"), given.pop("provider")
    values = {**given, "proxy_url": proxy["url"], "cdp_url": normalize_address(provider["cdp_url"])}
    with transaction.atomic(), sql.brief_lock_waits():
        row = _find_row(model, lock_for_write(model._default_manager.all()), **key)
        secrets = {name: proxy[name] for name in SECRETS if proxy[name] is not None}
        if needs_new_password(row, proxy["url"]) and len(secrets) < len(SECRETS):
            raise InvalidInput.of("proxy.password", "must be entered with the user name for another proxy")
        stored = {} if isinstance(row.proxy_secret, Sealed) else row.proxy_secret
        if secrets or not isinstance(row.proxy_secret, Sealed):
            row.proxy_secret = {name: value for name, value in (stored | secrets).items() if value}
            _check(row, values | row.proxy_secret)
        else:
            _check(row, values)
        row.browser = {name: value for name, value in values.items() if value}
        row._change_reason = build_api_key_actor(request).name[:100]
        row.save()
    return _serialize_browser(row)


def _check(row: Any, values: dict[str, Any]) -> None:
    found = ErrorCollector()
    stored = row if isinstance(row, Platform) else None
    shops = Shop.objects.select_related("platform")
    taken, inherited = {}, ""
    if not stored:
        taken = map_browsers_to_shops(shops.exclude(pk=row.pk))
        inherited = find_browser_address("", row.platform.browser.get("cdp_url", ""), row.shop_id)
    check_browser_settings(
        {(SETTINGS | SECRETS)[name]: value for name, value in values.items()}, found,
        is_platform=stored is not None, stored=stored, taken=taken, inherited=inherited, shops=shops, prefix="",
    )  # fmt: skip
    found.raise_if_any()


def _serialize_browser(row: Any) -> dict[str, Any]:
    nested: dict[str, Any] = {}
    for name, value in row.browser.items():
        if name in SETTINGS:
            put_value(nested, tuple(SETTINGS[name].split(".")), value)
    return nested | {"proxy": nested.get("proxy", {}) | {"has_password": bool(row.proxy_secret)}}
