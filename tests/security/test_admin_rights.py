"""Every address of the back office × the roles at its boundary × GET and a valid POST, against `admin_pages`.

A POST is valid: it is what the form held when the least role that may post opened it, with one change. The same POST
by that role takes effect, so a refusal has no other reason than the role.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import pytest
from django.contrib import admin
from django.contrib.auth.backends import ModelBackend
from django.contrib.auth.models import Group, Permission, User
from django.db import connection, transaction
from django.template.backends.django import Template
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
    STAFF,
    VIEWER,
    Action,
    Page,
    Role,
)
from tests.security.forms import main_form

pytestmark = pytest.mark.django_db(transaction=True)

ROLES = [role for role in Role if role != NOBODY]
#: The pages that every model has.
KINDS = {"changelist", "add", "history", "delete", "change", "simple_history"}
#: Tables that hold a line about a request that changes nothing else.
LOGS = {"django_admin_log", "scheduling_auditentry"}


# --- what there is ----------------------------------------------------------------------------------------------------


def models():
    return sorted(f"{model._meta.app_label}_{model._meta.model_name}" for model in admin.site._registry)


def routes(patterns=None, prefix=""):
    """The route within the site and the name of each address."""
    for each in admin.site.get_urls() if patterns is None else patterns:
        route = prefix + str(each.pattern)
        if isinstance(each, URLResolver):
            yield from routes(each.url_patterns, route)
        elif isinstance(each, URLPattern):
            yield route, each.name or ""


def is_of_model(name):
    """Whether it is a page that every model has."""
    return name not in PAGES and any(name == f"{model}_{kind}" for model in MODELS for kind in KINDS)


def test_each_admin_address_has_a_table_row():
    assert models() == sorted(MODELS)
    assert {name for _route, name in routes() if name and not is_of_model(name) and name not in OPEN} == set(PAGES)
    unnamed = {route for route, name in routes() if not name}
    known = {f"{model._meta.app_label}/{model._meta.model_name}/<path:object_id>/" for model in admin.site._registry}
    assert unnamed == {*known, "(?P<url>.*)$"}
    named = [name for _route, name in routes() if name and name not in OPEN]
    assert len(set(named)) == len(named), "two addresses share a name"


def pages_for(model):
    return next(
        each for each in admin.site._registry.values() if f"{each.opts.app_label}_{each.opts.model_name}" == model
    )


@dataclass(frozen=True, slots=True)
class Case:
    """One address, with the form that is posted to it."""

    name: str
    page: Page
    url: Callable[[User], str]
    form: Callable[[str], str] | None = None  #: the address whose form it is, where it is not its own
    reader: Role = NOBODY  #: the least role that may post that form to its own address

    def address(self, user):
        query = self.page.query() if callable(self.page.query) else self.page.query
        return self.url(user) + (f"?{query}" if query else "")


def cases_of(model):
    """The pages that every model has. To pages that only show something the form of the row is posted."""
    rights = MODELS[model]
    label, _under, name = model.rpartition("_")
    pages = pages_for(model)

    def url(kind, args):
        return lambda user: reverse(f"admin:{model}_{kind}", args=args(user))

    def bare(user):
        return reverse("admin:index") + f"{label}/{name}/{rights.row(user)[0]}/"

    def version(user):
        (pk,) = rights.row(user)
        row = pages.model._default_manager.get(pk=pk)
        if not row.history.exists():
            row.save()
        return (pk, row.history.latest().pk)

    def change(at):
        return at.split("/history/")[0].removesuffix("/") + "/change/"

    of_row = {"form": change, "reader": rights.change} if rights.change != NOBODY else {}
    of_list = {"form": lambda at: f"{at}add/", "reader": rights.add} if rights.add != NOBODY else {}
    changed, added = rights.changed, rights.added
    versioned = hasattr(pages, "history_form_view")
    yield Case("changelist", Page(rights.view, data=added), url("changelist", admin_pages.no_args), **of_list)
    yield Case("add", Page(rights.add, rights.add, data=added), url("add", admin_pages.no_args))
    yield Case("change", Page(rights.view, rights.change, data=changed), url("change", rights.row))
    delete = Page(rights.delete, rights.delete, form=False, data={"post": "yes"})
    yield Case("delete", delete, url("delete", rights.spare))
    yield Case("history", Page(rights.view, data=changed, safe=versioned), url("history", rights.row), **of_row)
    yield Case("bare", Page(STAFF, data=changed), bare, **of_row)
    if versioned:
        yield Case("version", Page(rights.view, data=changed, safe=True), url("simple_history", version), **of_row)


def own_pages():
    """The addresses that not every model has."""
    for name, page in PAGES.items():
        yield Case(name, page, lambda user, name=name, page=page: reverse(f"admin:{name}", args=page.args(user)))


# --- one request ------------------------------------------------------------------------------------------------------


TABLES = """
SELECT relname FROM pg_class
WHERE relnamespace = current_schema()::regnamespace AND relkind = 'r' AND relname <> 'django_session'
"""
#: Those that this transaction has written, also in a savepoint that was rolled back.
WRITTEN = f"""
{TABLES} AND pg_stat_get_xact_tuples_inserted(oid) + pg_stat_get_xact_tuples_updated(oid)
             + pg_stat_get_xact_tuples_deleted(oid) > 0
"""
DIGEST = """SELECT '{0}', md5(coalesce(string_agg(each::text, ',' ORDER BY each::text), '')) FROM "{0}" AS each"""


def read_digests(tables):
    """Read the digest of each table that the statement finds."""
    with connection.cursor() as cursor:
        cursor.execute(tables)
        if not (names := [name for (name,) in cursor.fetchall()]):
            return {}
        cursor.execute(" UNION ALL ".join(DIGEST.format(name) for name in names))
        return dict(cursor.fetchall())


def rows():
    """Read the digest of each table but that of the sessions, with what other transactions have committed."""
    return read_digests(TABLES)


@contextmanager
def rolled_back():
    with transaction.atomic():
        yield
        transaction.set_rollback(True)


@contextmanager
def unrendered():
    """Answer with empty pages: what is asked here is who may, and drawing takes nine tenths of a request's time."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(Template, "render", lambda *_, **named: "")
        patched.setattr(admin.site.__class__, "each_context", lambda site, request: {})
        yield


def remember_permissions(monkeypatch):
    """Read the rights of each user once: what a request changes is rolled back with it."""
    read, known = ModelBackend.get_all_permissions, {}

    def remember(backend, user, obj=None):
        if obj is None and user.is_active:
            if user.pk not in known:
                known[user.pk] = read(backend, user)
            return known[user.pk]
        return read(backend, user, obj)

    monkeypatch.setattr(ModelBackend, "get_all_permissions", remember)


@dataclass(frozen=True, slots=True)
class Answer:
    status: int
    location: str
    changed: list[str]  #: tables
    errors: str = ""  #: of the form, where it was shown again
    page: str = ""

    @property
    def to_login(self):
        return self.status == 302 and "/login/" in self.location

    @property
    def refused(self):
        return self.to_login or self.status in (403, 405)

    @property
    def answered(self):
        return self.status in (200, 302) and not self.to_login


@dataclass(frozen=True, slots=True)
class Person:
    name: str
    role: Role
    user: User  #: whose rows an address names
    client: Client


@dataclass(slots=True)
class Sweep:
    """One login for each role, and for an auditor: every `view_` right of every app, and no other."""

    people: dict[Role, Person]
    auditor: Person
    before: dict[str, str]  #: the digests of all tables; each request is rolled back
    forms: dict[str, dict[str, Any]] = field(default_factory=dict)  #: by the address

    def ask(self, person, method, url, data=None, *, render=False):
        client = Client(headers={"accept-language": "en"})  # a session that the request ends is rolled back with it
        client.cookies = copy.deepcopy(person.client.cookies)
        client.handler = person.client.handler  # it loads the middleware once
        before = read_digests(WRITTEN)
        with nullcontext() if render else unrendered():
            answer = getattr(client, method)(url, data or {})
            if answer.streaming:
                list(answer.streaming_content)
        after = read_digests(WRITTEN)
        changed = [name for name, digest in after.items() if before.get(name, self.before[name]) != digest]
        context = getattr(answer, "context_data", None) or {}
        form = context["adminform"].form if "adminform" in context else context.get("form")
        errors = str(dict(getattr(form, "errors", None) or {}))
        page = answer.content.decode() if render else ""
        return Answer(answer.status_code, answer.get("Location", ""), sorted(changed), errors, page)

    def fill_form(self, case, url, shown):
        """What a browser would send, with the change of the table. `shown` is the page, if the user has seen it."""
        changes = admin_pages.resolved(case.page.data)
        if case.form is not None:
            return {**self.read_form(case.form(url), case.reader), **changes}
        if shown is not None:
            return {**fields_of(shown, url), **changes}
        if case.page.do != NOBODY and case.page.form:
            return {**self.read_form(url, case.page.do), **changes}
        return changes

    def read_form(self, url, reader):
        if url not in self.forms:
            answer = self.ask(self.people[reader], "get", url, render=True)
            assert answer.changed == [], (url, "changes rows while it is drawn")
            self.forms[url] = fields_of(answer, url)
        return self.forms[url]


def fields_of(shown, url):
    form = main_form(shown.page)
    assert form is not None, (url, "shows no form")
    return dict(form.values)


@pytest.fixture
def sweep(matrix, record_event, static_root, monkeypatch, hide_menu):
    """With a row of everything."""
    hide_menu()
    remember_permissions(monkeypatch)
    Command().grant_permissions()
    users = {ADMIN: User.objects.create_superuser("admin", password="x")}
    for role in ROLES[1:-1]:
        users[role] = User.objects.create_user(role.name.lower(), password="x", is_staff=True)
        if role != STAFF:
            users[role].groups.add(Group.objects.get(name=role.name.lower()))
    auditor = User.objects.create_user("auditor", password="x", is_staff=True)
    auditor.user_permissions.set(Permission.objects.filter(codename__startswith="view_"))

    def log_in(role, user):
        client = Client()
        client.force_login(user, backend="django.contrib.auth.backends.ModelBackend")
        return Person(user.get_username(), role, user, client)

    people = {role: log_in(role, user) for role, user in users.items()}
    # No page is anonymous, but each needs an owner for the rows that it names.
    people[ANONYMOUS] = Person("anonymous", ANONYMOUS, users[ADMIN], Client())
    admin_pages.build(matrix, record_event)
    return Sweep(people, log_in(VIEWER, auditor), rows())


# --- the sweep --------------------------------------------------------------------------------------------------------


def test_each_role_has_the_rights_of_the_one_below():
    Command().grant_permissions()
    below = set()
    for name in ("viewer", "operator", "editor"):
        rights = set(Group.objects.get(name=name).permissions.values_list("codename", flat=True))
        assert below < rights, name
        below = rights


def at_boundary(least, sweep):
    """The lowest role that may, the highest that may not, and a stranger. Rights only grow from role to role."""
    allowed = [role for role in ROLES if role >= least]
    refused = [role for role in ROLES if role < least]
    return [sweep.people[role] for role in dict.fromkeys([*allowed[:1], *refused[-1:], ANONYMOUS])]


def who_posts(see, do, sweep):
    """Those at the boundary of `do`. The auditor too, unless the highest of those who may not sees the page as well.

    The auditor sees some pages that no editor does.
    """
    highest = max(role for role in ROLES if role < do or role == ANONYMOUS)
    auditor = [] if do != ADMIN and highest >= max(see, VIEWER) else [sweep.auditor]
    return [*at_boundary(do, sweep), *auditor]


@pytest.mark.timeout(900)  # about 2,000 requests
def test_each_role_can_do_what_the_table_allows(sweep):
    """Each request is rolled back, so all places are judged on the same rows."""
    wrong = [each for case in own_pages() for each in violations(case, sweep)]
    for model in models():
        wrong += [f"{model}: {each}" for case in cases_of(model) for each in violations(case, sweep)]
        wrong += [f"{model}: {each}" for each in action_violations(model, sweep)]
    assert wrong == [], "\n".join(wrong)
    assert rows() == sweep.before  # nothing was written by another connection either


def violations(case, sweep):
    """Each way in which a user can do more or less than the table allows."""
    page = case.page
    data = None
    posted = set()
    for person in at_boundary(page.see, sweep):
        with rolled_back():
            url = case.address(person.user)
            does = person.role == page.see == page.do  # whoever may see it posts what the page shows
            answer = sweep.ask(person, "get", url, render=does and page.form)
            yield from wrong_views(case, person, answer)
            if does:
                data = sweep.fill_form(case, url, answer if page.form else None)
                yield from wrong_effects(case, person, sweep, sweep.ask(person, "post", url, data))
                posted.add(person.role)
    for person in who_posts(page.see, page.do, sweep):  # who may comes first, with the form of its own row
        if person.role in posted and person is not sweep.auditor:
            continue
        with rolled_back():
            url = case.address(person.user)
            data = sweep.fill_form(case, url, None) if data is None else data
            yield from wrong_effects(case, person, sweep, sweep.ask(person, "post", url, data))


def wrong_views(case, person, answer):
    page = case.page
    if person.role >= page.see:
        if not answer.answered:
            yield f"{case.name}: GET of {person.name} is refused: {answer}"
    elif not (answer.refused or (page.hides and answer.status == 404)):
        yield f"{case.name}: GET of {person.name} is answered: {answer}"
    if answer.changed and not (page.notes and set(answer.changed) <= LOGS):
        yield f"{case.name}: GET of {person.name} changes rows: {answer}"


def wrong_effects(case, person, sweep, answer):
    page = case.page
    if person.role >= page.do:
        if not answer.answered or bool(answer.changed) != page.writes:
            yield f"{case.name}: POST of {person.name} has no effect: {answer}"
        return
    if answer.changed:
        yield f"{case.name}: POST of {person.name} changes rows: {answer}"
    only_shows = page.do == NOBODY and not page.safe and (person.role >= page.see or person is sweep.auditor)
    if not (answer.refused or only_shows or (page.hides and answer.status == 404)):
        yield f"{case.name}: POST of {person.name} is answered: {answer}"


def action_violations(model, sweep):
    table = {name: each for (owner, name), each in ACTIONS.items() if owner == model}
    request = RequestFactory().get("/")
    request.user = sweep.people[ADMIN].user
    offered = sorted(pages_for(model).get_actions(request))
    if "delete_selected" in offered:
        table["delete_selected"] = [Action(MODELS[model].delete, MODELS[model].spare, {"post": "yes"})]
    if set(offered) != set(table):
        yield f"the list offers {offered}, the table has {sorted(table)}"
    for name, actions in table.items():
        for action in actions:
            for person in who_posts(MODELS[model].view, action.do, sweep):
                with rolled_back():
                    chosen = [str(pk) for pk in action.rows(person.user)]
                    data = {"action": name, "index": "0", "_selected_action": chosen, **action.data}
                    url = reverse(f"admin:{model}_changelist")
                    answer = sweep.ask(person, "post", url, data)
                leads = answer.status == 302 and "/run-now/" in answer.location
                effect = bool(answer.changed) if action.writes else leads
                if effect != (person.role >= action.do):
                    yield f"{name}: {person.name} {'has an' if effect else 'has no'} effect: {answer}"
                if answer.changed and person.role < action.do:
                    yield f"{name}: {person.name} changes rows: {answer}"
