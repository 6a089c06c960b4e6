"""List and operate shops and execution nodes, read and set the browser settings of shops and platforms."""

from __future__ import annotations

from collections.abc import Callable
from datetime import datetime
from typing import Annotated, Any
from uuid import UUID

from django.db import transaction
from django.db.models import BooleanField, ExpressionWrapper, Model, Q, QuerySet
from django.db.models.functions import Now
from django.http import HttpRequest
from ninja import Field, Path, Query, Router, Schema

from rpa_tasks.api.jobs import OPERATE, PROBLEMS, READ, ShortText
from rpa_tasks.browser_settings import (
    SECRETS,
    SETTINGS,
    check_browser_settings,
    find_browser_address,
    map_browsers_to_shops,
    needs_new_password,
    normalize_address,
)
from rpa_tasks.jobs import shops
from rpa_tasks.jobs.ledger import NODE_SILENT
from rpa_tasks.jobs.nodes import count_free_slots, drain_node, measure_loads, resume_node
from rpa_tasks.models import ExecutionNode, LoginState, Platform, Shop
from scheduling import sql
from scheduling.api.auth import ApiKeyAuth, build_api_key_actor
from scheduling.api.schemas import Page, ProblemOut, Request, Text, build_page, limit_list_time
from scheduling.configuration.file.section import put_value
from scheduling.errors import ErrorCollector, InvalidInput, NotFound
from scheduling.models.encrypted import Sealed
from scheduling.models.versioned import lock_for_write

router = Router(tags=["RPA"], auth=READ)
LARGEST_KEY = 2**63 - 1


class ShopFilters(Page):
    platform: Text = ""
    login: LoginState | None = None


class ShopOut(Schema):
    platform: str = Field(alias="platform.key")
    shop_id: str
    name: str
    login: str
    login_lost_at: datetime | None
    paused: bool
    platform_paused: bool = Field(alias="platform.paused")
    breaker_open_until: datetime | None = Field(alias="platform.breaker.open_until")
    dedicated_queue: bool
    waiting: int
    running: UUID | None = Field(alias="lane.task_id")
    last_served_at: datetime | None = Field(alias="lane.last_served_at")
    last_success_at: datetime | None = Field(alias="lane.last_success_at")

    @staticmethod
    def resolve_login(shop: Any) -> str:
        return "checking" if shop.checked and shop.login_state == LoginState.NEEDED else shop.login_state


class ShopsOut(Schema):
    items: list[ShopOut]
    next: str | None


class RebalanceIn(Request):
    """Filters of shops that leave their preferred node. All given ones must match; `platform` or `node` is required."""

    platform: Text = ""
    shop_ids: Annotated[list[Text], Field(max_length=5_000)] = []
    node: Text = ""


class RebalancedOut(Schema):
    released: int
    running: int


@router.get("/rpa/shops", response={200: ShopsOut, PROBLEMS: ProblemOut})
def list_shops(request: HttpRequest, filters: Query[ShopFilters]) -> dict[str, Any]:
    """List shops with their state."""
    with limit_list_time():
        before = filters.before()
        if before is not None and before.int > LARGEST_KEY:
            raise InvalidInput.of("cursor", "is not one that this list has given out")
        found = select_shops().filter(platform__retired_at=None, pk__gt=before.int if before else 0)
        if filters.platform:
            found = found.filter(platform__key=filters.platform)
        if filters.login:
            is_needed = filters.login == LoginState.NEEDED
            found = found.filter(shops.needs_login() if is_needed else Q(login_state=filters.login))
        rows = list(found.order_by("pk")[: filters.limit + 1])
        return build_page(rows, [UUID(int=row.pk) for row in rows], filters.limit)


def select_shops() -> QuerySet[Any]:
    """Return active shops with `waiting`, the number of waiting jobs, and `checked`: if a login check is open."""
    found = Shop.objects.filter(retired_at=None).select_related("platform__breaker", "lane")
    return found.annotate(waiting=shops.count_waiting_jobs(), checked=shops.is_being_checked())


@router.post("/rpa/shops/rebalance", auth=OPERATE, response={200: RebalancedOut, PROBLEMS: ProblemOut})
def rebalance(request: HttpRequest, wish: RebalanceIn) -> shops.UnpinCounts:
    """Release the preferred node of many shops. Nodes with free slots take the shops with a new browser profile, so
    platforms may ask for a login again. Shops with a running job keep their node and count as `running`."""
    with sql.brief_lock_waits():
        return shops.unpin_matching_shops(
            by=build_api_key_actor(request).name, platform=wish.platform, shop_ids=wish.shop_ids, node=wish.node
        )


@router.post("/rpa/shops/{platform}/{shop_id}/logged-in", auth=OPERATE, response={200: ShopOut, PROBLEMS: ProblemOut})
def logged_in(request: HttpRequest, platform: Path[Text], shop_id: Path[Text]) -> Any:
    """Confirm that an operator logged the shop in. Its jobs continue. If the platform has a login check, it runs first,
    and `login` is `checking` until it has ended."""
    return _act_on_shop(request, platform, shop_id, shops.check_login)


@router.post("/rpa/shops/{platform}/{shop_id}/pause", auth=OPERATE, response={200: ShopOut, PROBLEMS: ProblemOut})
def pause(request: HttpRequest, platform: Path[Text], shop_id: Path[Text]) -> Any:
    """Start no more jobs of this shop. A running job continues. Idempotent."""
    return _act_on_shop(request, platform, shop_id, shops.pause_shop)


@router.post("/rpa/shops/{platform}/{shop_id}/resume", auth=OPERATE, response={200: ShopOut, PROBLEMS: ProblemOut})
def resume(request: HttpRequest, platform: Path[Text], shop_id: Path[Text]) -> Any:
    """End the pause of the shop."""
    return _act_on_shop(request, platform, shop_id, shops.resume_shop)


def _act_on_shop(request: HttpRequest, platform: str, shop_id: str, act: Callable[..., bool]) -> Any:
    found = select_shops().filter(platform__key=platform, shop_id=shop_id)
    pk = found.values_list("pk", flat=True).first()
    if pk is None:
        raise NotFound(f"There is no shop {platform}/{shop_id}.")
    with sql.brief_lock_waits():
        act(pk, by=build_api_key_actor(request).name)
    return found.get()


# --- browser settings -------------------------------------------------------------------------------------------------


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
            _check_settings(row, values | row.proxy_secret)
        else:
            _check_settings(row, values)
        row.browser = {name: value for name, value in values.items() if value}
        row._change_reason = build_api_key_actor(request).name[:100]
        row.save()
    return _serialize_browser(row)


def _check_settings(row: Any, values: dict[str, Any]) -> None:
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


# --- execution nodes --------------------------------------------------------------------------------------------------


class NodeOut(Schema):
    """`empty`: a stop of the node ends no run and no take-over. `pinned` shops have their login only there."""

    name: str
    reports: bool
    seen_at: datetime
    started_at: datetime
    draining_at: datetime | None
    drained_by: str
    slots: int
    free_slots: int
    running: int = Field(alias="load.running")
    take_overs: int = Field(alias="load.take_overs")
    pinned: int = Field(alias="load.pinned")
    waiting: int = Field(alias="load.waiting")
    empty: bool = Field(alias="load.is_empty")
    queues: list[str] = Field(alias="serves")


class NodesOut(Schema):
    items: list[NodeOut]


@router.get("/rpa/nodes", response={200: NodesOut, PROBLEMS: ProblemOut})
def list_nodes(request: HttpRequest) -> dict[str, Any]:
    """List all execution nodes with their load. `pinned` counts the shops whose browser profile a node has, `waiting`
    those of them with a due job."""
    with limit_list_time():
        return {"items": _list_nodes(ExecutionNode.objects.all())}


@router.post("/rpa/nodes/{name}/drain", auth=OPERATE, response={200: NodeOut, PROBLEMS: ProblemOut})
def drain_execution_node(request: HttpRequest, name: Path[Text]) -> ExecutionNode:
    """Let the node start nothing new. Running jobs and take-overs continue. Idempotent."""
    with sql.brief_lock_waits():
        drain_node(name, by=build_api_key_actor(request).name)
    return _list_nodes(ExecutionNode.objects.filter(name=name))[0]


@router.post("/rpa/nodes/{name}/resume", auth=OPERATE, response={200: NodeOut, PROBLEMS: ProblemOut})
def resume_execution_node(request: HttpRequest, name: Path[Text]) -> ExecutionNode:
    """Let the node start jobs again. Idempotent."""
    with sql.brief_lock_waits():
        resume_node(name, by=build_api_key_actor(request).name)
    return _list_nodes(ExecutionNode.objects.filter(name=name))[0]


def _list_nodes(rows: QuerySet[ExecutionNode]) -> list[ExecutionNode]:
    reports = ExpressionWrapper(Q(seen_at__gt=Now() - NODE_SILENT), BooleanField())
    nodes: list[Any] = list(rows.annotate(reports=reports).order_by("name"))
    loads = measure_loads([node.name for node in nodes])
    for node in nodes:
        node.load = loads[node.name]
        node.free_slots = count_free_slots(node, node.load, reports=node.reports)
    return nodes
