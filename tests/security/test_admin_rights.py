"""Every address of the back office × the roles at its boundary × GET and a valid POST, against `admin_pages`.

A POST is valid: it is what the form held when an administrator opened it, with one change. The same POST by an
administrator takes effect, so a refusal has no other reason than the role.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import pytest
from django.contrib import admin
from django.contrib.auth.models import Group, Permission, User
from django.db import connection, transaction
from django.test import Client, RequestFactory
from django.urls import URLPattern, URLResolver, reverse

from scheduling.management.commands.bootstrap import Command
from tests.security import admin_pages
from tests.security.admin_pages import (
    ACTIONS,
    ADMIN,
    ANONYMOUS,
    MODELS,
    NOBODY,
    OPEN,
    PAGES,
    RENAMED,
    STAFF,
    VIEWER,
    Action,
    Page,
    Role,
)
from tests.security.forms import main_form
from tests.support.matrix import MatrixBuilder, RecordEvent

pytestmark = pytest.mark.django_db(transaction=True)

#: Every `view_` right of every app, and no other: what an auditor is given.
AUDITOR = "auditor"
ROLES = (ANONYMOUS, STAFF, VIEWER, admin_pages.OPERATOR, admin_pages.EDITOR, ADMIN)
ROUTES = {
    "changelist": "", "add": "add/", "history": "history/", "delete": "delete/", "change": "change/",
    "simple_history": "history/version/", "bare": "/",
}  # fmt: skip


class Digests:
    """Digests of all tables but that of the sessions, read again only for tables that this transaction has written."""

    def __init__(self) -> None:
        self._found: dict[str, tuple[int, str]] = {}  #: by table: the count of writes at that time, and the digest

    def read(self) -> dict[str, str]:
        writes = count_writes()
        stale = [name for name in writes if self._found.get(name, (-1, ""))[0] != writes[name]]
        self._found.update({name: (writes[name], digest) for name, digest in read_digests(stale).items()})
        return {name: self._found[name][1] for name in writes}


@dataclass(slots=True)
class Staff:
    clients: dict[Role, Client]
    users: dict[Role, User]
    auditor: tuple[Client, User]
    #: What each address showed to each client. A page is read once: each request is rolled back.
    forms: dict[tuple[Client, str], dict[str, Any] | None] = field(default_factory=dict)
    digests: Digests = field(default_factory=Digests)


@pytest.fixture
def staff(matrix: MatrixBuilder, record_event: RecordEvent, static_root: None) -> Staff:
    """One login for each role, and a row of everything."""
    Command().grant_permissions()
    users, clients = {}, {ANONYMOUS: Client()}
    for role in ROLES[1:-1]:
        user = User.objects.create_user(role.name.lower(), password="x", is_staff=True)
        if role != STAFF:
            user.groups.add(Group.objects.get(name=role.name.lower()))
        users[role] = user
    users[ADMIN] = User.objects.create_superuser("admin", password="x")
    auditor = User.objects.create_user(AUDITOR, password="x", is_staff=True)
    auditor.user_permissions.set(Permission.objects.filter(codename__startswith="view_"))
    for role, user in users.items():
        clients[role] = logged_in(user)
    admin_pages.build(matrix, record_event)
    users[ANONYMOUS] = users[ADMIN]  # no page is anonymous, but each needs an owner for the rows that it names
    return Staff(clients, users, (logged_in(auditor), auditor))


def logged_in(user: User) -> Client:
    client = Client(headers={"accept-language": "en"})
    client.force_login(user, backend="django.contrib.auth.backends.ModelBackend")
    return client


# --- what there is ----------------------------------------------------------------------------------------------------


def models() -> list[str]:
    return sorted(f"{model._meta.app_label}_{model._meta.model_name}" for model in admin.site._registry)


def routes(patterns: Any = None, prefix: str = "") -> Iterator[tuple[str, str]]:
    """The route within the site and the name of each address."""
    for each in admin.site.get_urls() if patterns is None else patterns:
        route = prefix + str(each.pattern)
        if isinstance(each, URLResolver):
            yield from routes(each.url_patterns, route)
        elif isinstance(each, URLPattern):
            yield route, RENAMED.get(route) or each.name or ""


def of_model(name: str) -> tuple[str, str] | None:
    """The model and the page of it, for the pages that every model has."""
    model, _under, kind = name.rpartition("_")
    if name.endswith("_simple_history"):
        model, kind = name.removesuffix("_simple_history"), "simple_history"
    return (model, kind) if model in MODELS and kind in ROUTES and name not in PAGES else None


def own_pages() -> list[str]:
    """The names of the addresses that not every model has."""
    return sorted({name for _route, name in routes() if name and not of_model(name) and name not in OPEN})


def test_each_admin_address_has_a_table_row() -> None:
    assert models() == sorted(MODELS)
    assert own_pages() == sorted(PAGES)
    unnamed = {route for route, name in routes() if not name}
    known = {f"{model._meta.app_label}/{model._meta.model_name}/<path:object_id>/" for model in admin.site._registry}
    assert unnamed == {*known, "(?P<url>.*)$"}
    named = [(route, name) for route, name in routes() if name and name not in OPEN]
    assert len({name for _route, name in named}) == len(named), "two addresses share a name: see RENAMED"


def pages_for(model: str) -> Any:
    return next(each for each in admin.site._registry.values() if key_of(each) == model)


def key_of(pages: Any) -> str:
    return f"{pages.opts.app_label}_{pages.opts.model_name}"


# --- one request ------------------------------------------------------------------------------------------------------


def rows() -> dict[str, str]:
    """Read the digest of each table, with what other transactions have committed."""
    return read_digests(count_writes())


def count_writes() -> dict[str, int]:
    """Rows that this transaction has written so far, by table. Those of a savepoint that was rolled back count too."""
    with connection.cursor() as cursor:
        cursor.execute(
            "SELECT relname, n_tup_ins + n_tup_upd + n_tup_del FROM pg_stat_xact_user_tables"
            " WHERE schemaname = current_schema() AND relname <> 'django_session'"
        )
        return dict(cursor.fetchall())


def read_digests(tables: Iterable[str]) -> dict[str, str]:
    parts = [
        f"SELECT '{name}', md5(coalesce(string_agg(each::text, ',' ORDER BY each::text), '')) FROM \"{name}\" AS each"
        for name in tables
    ]
    if not parts:
        return {}
    with connection.cursor() as cursor:
        cursor.execute(" UNION ALL ".join(parts))
        return dict(cursor.fetchall())


def copy_client(client: Client) -> Client:
    """The same login; a session that the request ends is rolled back with it."""
    twin = Client(headers={"accept-language": "en"})
    twin.cookies = copy.deepcopy(client.cookies)
    twin.handler = client.handler  # it loads the middleware once
    return twin


@dataclass(frozen=True, slots=True)
class Answer:
    status: int
    location: str
    changed: list[str]  #: tables
    errors: str = ""  #: of the form, where it was shown again

    @property
    def to_login(self) -> bool:
        return self.status == 302 and "/login/" in self.location

    @property
    def refused(self) -> bool:
        return self.to_login or self.status in (403, 405)

    @property
    def answered(self) -> bool:
        return self.status in (200, 302) and not self.to_login


def ask(staff: Staff, client: Client, method: str, url: str, data: Any = None) -> Answer:
    before = staff.digests.read()
    answer = getattr(copy_client(client), method)(url, data or {})
    if answer.streaming:
        list(answer.streaming_content)
    after = staff.digests.read()
    changed = sorted(name for name in after if before.get(name) != after[name])
    return Answer(answer.status_code, answer.get("Location", ""), changed, errors_of(answer))


def errors_of(answer: Any) -> str:
    context = answer.context or {}
    form = context["adminform"].form if "adminform" in context else context.get("form")
    return str(dict(getattr(form, "errors", None) or {}))


def fill_form(staff: Staff, url: str, changes: Mapping[str, Any], client: Client | None = None) -> dict[str, Any]:
    """What a browser would send, with changes. The version of the row is that of the client's own page, if it has one.

    The version covers the fields that the role may edit.
    """
    found = read_form(staff, staff.clients[ADMIN], url)
    assert found is not None, (url, "shows no form")
    values = dict(found)
    if "row_version" in values and client and (own := read_form(staff, client, url)) and "row_version" in own:
        values["row_version"] = own["row_version"]
    return {**values, **resolve_values(changes)}


def read_form(staff: Staff, client: Client, url: str) -> dict[str, Any] | None:
    if (client, url) not in staff.forms:
        page = copy_client(client).get(url)
        form = main_form(page.content.decode()) if page.status_code == 200 else None
        staff.forms[client, url] = dict(form.values) if form is not None else None
    return staff.forms[client, url]


def resolve_values(data: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value() if callable(value) else value for name, value in data.items()}


#: Tables that hold a line about a request that changes nothing else.
LOGS = {"django_admin_log", "scheduling_auditentry"}


# --- the sweep --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Case:
    """One address, with the form that is posted to it."""

    name: str
    page: Page
    url: Callable[[User], str]
    form: Callable[[str], str] | None = None  #: the address whose form it is, where it is not its own


def cases_of(model: str) -> Iterator[Case]:
    """The pages that every model has. To pages that only show something the form of the row is posted."""
    rights = MODELS[model]
    label, _under, name = model.rpartition("_")
    pages = pages_for(model)

    def url(kind: str, args: Any) -> Callable[[User], str]:
        return lambda user: reverse(f"admin:{model}_{kind}", args=args(user))

    def bare(user: User) -> str:
        return reverse("admin:index") + f"{label}/{name}/{rights.row(user)[0]}/"

    def version(user: User) -> tuple[Any, ...]:
        (pk,) = rights.row(user)
        row = pages.model._default_manager.get(pk=pk)
        if not row.history.exists():
            row.save()
        return (pk, row.history.latest().pk)

    versioned = hasattr(pages, "history_form_view")
    editable, addable = rights.change != NOBODY, rights.add != NOBODY
    changed, added = rights.changed, rights.added
    of_row = (lambda at: at.split("/history/")[0].split("/delete/")[0] + "/change/") if editable else None
    of_list = (lambda at: f"{at}add/") if addable else None
    yield Case("changelist", Page(rights.view, data=added), url("changelist", admin_pages.no_args), of_list)
    yield Case("add", Page(rights.add, rights.add, data=added), url("add", admin_pages.no_args))
    yield Case("change", Page(rights.view, rights.change, data=changed), url("change", rights.row))
    yield Case(
        "delete", Page(rights.delete, rights.delete, form=False, data={"post": "yes"}), url("delete", rights.spare)
    )
    yield Case("history", Page(rights.view, data=changed, safe=versioned), url("history", rights.row), of_row)
    yield Case("bare", Page(STAFF, data=changed), bare, (lambda at: f"{at}change/") if editable else None)
    if versioned:
        yield Case("version", Page(rights.view, data=changed, safe=True), url("simple_history", version), of_row)


def list_violations(case: Case, staff: Staff) -> Iterator[str]:
    """Each way in which a role can do more or less than the table allows."""
    for role in at_boundary(case.page.see):
        yield from _get_violations(case, staff, role)
    for role in at_boundary(case.page.do):
        yield from _post_violations(case, staff, role.name, staff.clients[role], staff.users[role], role)
    yield from _post_violations(case, staff, AUDITOR, *staff.auditor, VIEWER)


def at_boundary(least: Role) -> list[Role]:
    """The lowest role that may, the highest that may not, and a stranger. Rights only grow from role to role."""
    allowed = [role for role in ROLES if role >= least]
    refused = [role for role in ROLES if role < least]
    return sorted({ANONYMOUS, *allowed[:1], *refused[-1:]})


def test_each_role_has_the_rights_of_the_one_below() -> None:
    Command().grant_permissions()
    below: set[str] = set()
    for name in ("viewer", "operator", "editor"):
        rights = set(Group.objects.get(name=name).permissions.values_list("codename", flat=True))
        assert below < rights, name
        below = rights


def _address(case: Case, user: User) -> str:
    query = case.page.query() if callable(case.page.query) else case.page.query
    return case.url(user) + (f"?{query}" if query else "")


def _get_violations(case: Case, staff: Staff, role: Role) -> Iterator[str]:
    with rolled_back():
        answer = ask(staff, staff.clients[role], "get", _address(case, staff.users[role]))
        if role >= case.page.see:
            if not answer.answered:
                yield f"{case.name}: GET of {role.name} is refused: {answer}"
        elif not (answer.refused or (case.page.hides and answer.status == 404)):
            yield f"{case.name}: GET of {role.name} is answered: {answer}"
        if answer.changed and not (case.page.notes and set(answer.changed) <= LOGS):
            yield f"{case.name}: GET of {role.name} changes rows: {answer}"


def _post_violations(case: Case, staff: Staff, name: str, client: Client, user: User, role: Role) -> Iterator[str]:
    page = case.page
    with rolled_back():
        url = _address(case, user)
        answer = ask(staff, client, "post", url, _data(case, staff, url, client))
        if role >= page.do:
            if not answer.answered or bool(answer.changed) != page.writes:
                yield f"{case.name}: POST of {name} has no effect: {answer}"
            return
        if answer.changed:
            yield f"{case.name}: POST of {name} changes rows: {answer}"
        only_shows = page.do == NOBODY and not page.safe and (role >= page.see or name == AUDITOR)
        if not (answer.refused or only_shows or (page.hides and answer.status == 404)):
            yield f"{case.name}: POST of {name} is answered: {answer}"


def _data(case: Case, staff: Staff, url: str, client: Client) -> dict[str, Any]:
    page = case.page
    if case.form is not None:
        return fill_form(staff, case.form(url), page.data, client)
    return fill_form(staff, url, page.data, client) if page.do != NOBODY and page.form else resolve_values(page.data)


class rolled_back:
    """A block whose writes are undone, whatever it yields."""

    def __enter__(self) -> None:
        self._block = transaction.atomic()
        self._block.__enter__()

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        if kind is None:
            transaction.set_rollback(True)
        self._block.__exit__(kind, error, trace)


@pytest.mark.parametrize("app", [*sorted({model._meta.app_label for model in admin.site._registry}), "site"])
def test_each_role_can_do_what_the_table_allows(staff: Staff, app: str) -> None:
    """`app` has models with all their addresses and actions; "site" is what belongs to none.

    Each request is rolled back, so all places of an app are judged on the same rows.
    """
    places = [model for model in models() if model.startswith(f"{app}_")] or [app]
    before = rows()
    wrong = [f"{place}: {each}" for place in places for each in list_place_violations(place, staff)]
    assert wrong == [], "\n".join(wrong)
    assert rows() == before  # nothing was written by another connection either


def list_place_violations(place: str, staff: Staff) -> Iterator[str]:
    for case in pages_of(place):
        yield from list_violations(case, staff)
    if place in MODELS:
        for case in cases_of(place):
            yield from list_violations(case, staff)
        yield from list_action_violations(place, staff)


def pages_of(place: str) -> Iterator[Case]:
    """The addresses that not every model has."""
    known = {key: route for route, key in RENAMED.items()}

    def url(name: str, page: Page) -> Callable[[User], str]:
        if name in known:
            return lambda user: reverse("admin:index") + known[name]
        return lambda user: reverse(f"admin:{name}", args=page.args(user))

    for name, page in PAGES.items():
        owner = next((model for model in MODELS if name.startswith(f"{model}_")), "site")
        if name == "chat_sessions_live":
            owner = "chat_sessions_silencepolicy"
        if owner == place:
            yield Case(name, page, url(name, page))


def list_action_violations(model: str, staff: Staff) -> Iterator[str]:
    found = {name: each for (owner, name), each in ACTIONS.items() if owner == model}
    there = offered(staff.users[ADMIN], model)
    if "delete_selected" in there:
        found["delete_selected"] = [Action(MODELS[model].delete, MODELS[model].spare, {"post": "yes"})]
    if set(there) != set(found):
        yield f"{model}: the list offers {there}, the table has {sorted(found)}"
    for name, several in found.items():
        for action in several:
            yield from _action_violations(model, name, action, staff)


def offered(user: User, model: str) -> list[str]:
    request = RequestFactory().get("/")
    request.user = user
    return sorted(pages_for(model).get_actions(request))


def _action_violations(model: str, name: str, action: Action, staff: Staff) -> Iterator[str]:
    every = [(role.name, staff.clients[role], role) for role in at_boundary(action.do)]
    for who, client, role in [*every, (AUDITOR, staff.auditor[0], VIEWER)]:
        with rolled_back():
            chosen = [str(pk) for pk in action.rows(staff.users[role])]
            data = {"action": name, "index": "0", "_selected_action": chosen, **action.data}
            url = f"{reverse(f'admin:{model}_changelist')}?{action.query}"
            answer = ask(staff, client, "post", url, data)
            leads = answer.status == 302 and "/run-now/" in answer.location
            effect = bool(answer.changed) if action.writes else leads
            if effect != (role >= action.do):
                yield f"{name}: {who} {'has an' if effect else 'has no'} effect: {answer}"
            if answer.changed and role < action.do:
                yield f"{name}: {who} changes rows: {answer}"
