"""A list is narrowed by its own filters only: what the pages hide cannot be asked for digit by digit."""

import pytest
from django.contrib import admin
from django.contrib.admin.options import IncorrectLookupParameters
from django.contrib.auth.models import User
from django.core.exceptions import SuspiciousOperation
from django.test import RequestFactory
from django.urls import reverse

from scheduling import redaction
from scheduling.models import FailedTask, Touch
from tests.scheduling.core.conftest import deliver
from tests.support.tables import each_row

pytestmark = pytest.mark.django_db


def address(model):
    return reverse(f"admin:{model._meta.app_label}_{model._meta.model_name}_changelist")


@each_row(
    "name, lookup",
    [
        ("scheduling_customer", "addresses__phone__startswith"),
        ("scheduling_customer", "addresses__contains"),
        ("scheduling_customer", "name__startswith"),
        ("scheduling_touch", "customer__addresses__phone__startswith"),
        ("scheduling_touch", "node__channel__config__contains"),
        ("scheduling_touch", "state__startswith"),
        ("scheduling_event", "data__phone__startswith"),
        ("scheduling_failedtask", "payload__user_id__startswith"),
        ("scheduling_failedtask", "pk__in"),
        ("rpa_tasks_job", "payload__password__startswith"),
        ("rpa_tasks_job", "shop__name__startswith"),
        ("scheduling_complaint", "customer_id"),
    ],
)
def test_list_lookup_without_filter_is_refused(viewer, name, lookup):
    assert viewer.get(reverse(f"admin:{name}_changelist"), {lookup: "1"}).status_code == 400


def test_list_lookup_by_startswith_is_refused_for_all_columns(matrix):
    user = User.objects.create_superuser("admin", password="x")
    taken = [
        (model.__name__, field.name)
        for model in admin.site._registry
        for field in model._meta.get_fields()
        if accepts(user, f"{address(model)}?{field.name}__startswith=1")
    ]
    assert taken == []


def accepts(user, link):
    """Whether the list of the link takes its lookups. The page would take ten times as long to be drawn."""
    pages = {address(model): each for model, each in admin.site._registry.items()}[link.partition("?")[0]]
    request = RequestFactory().get(link)
    request.user = user
    try:
        pages.get_changelist_instance(request)
    except (SuspiciousOperation, IncorrectLookupParameters):
        return False
    return True


TEXT = "first line\ncall 13812345678 or １3912345678 TOKEN=s3cret-value"
#: A term, and whether it is in what is shown: `call 138****5678 or 139****5678 TOKEN=****`.
TERMS = [
    ("call", True), ("138", True), ("5678", True), ("Or １39", True), ("token=", True),
    ("1381", False), ("13812345678", False), ("call 1381", False), ("2345", False), ("１3912", False), ("s3cr", False),
    ("token=s", False), ("****", False),
]  # fmt: skip


def search(user, model, term):
    """The rows of the list. Its page would take ten times as long to be drawn."""
    request = RequestFactory().get(address(model), {"q": term})
    request.user = user
    return {row.pk for row in admin.site._registry[model].get_changelist_instance(request).result_list}


@pytest.fixture
def user_of(as_member):
    def user_of(role):
        as_member(role)
        return User.objects.get(username=role)

    return user_of


@pytest.mark.django_db(transaction=True)
def test_search_of_touches_finds_only_words_that_are_shown(user_of, matrix, record_event):
    viewer = user_of("viewer")
    matrix.node("n", template=matrix.template("t", body=TEXT))
    (task_id,) = record_event().task_ids
    deliver([task_id])
    for term, found in [("first", True), *TERMS]:
        assert (term, search(viewer, Touch, term)) == (term, {task_id} if found else set())


def test_search_of_failed_tasks_finds_only_words_that_are_shown(user_of):
    """Also of users who act on all matching rows: the list and the action find the same."""
    row = FailedTask.objects.create(origin="touch", failure="failed", reason="x", detail=TEXT)
    users = [user_of(role) for role in ("viewer", "operator")]
    for term, found in [("first", True), *TERMS]:
        for user in users:
            assert (term, search(user, FailedTask, term)) == (term, {row.pk} if found else set())


def test_search_of_failed_tasks_reads_a_bounded_length_of_text(user_of, monkeypatch):
    """An old detail that is not compared with what is shown is not found. Equal ones are read once."""
    monkeypatch.setattr(redaction, "MOST_SEARCHED", 2 * len("call 13812345671"))
    rows = [
        FailedTask.objects.create(origin="touch", failure="failed", reason="x", detail=f"call 1381234567{number}")
        for number in (1, 2, 2, 3)
    ]
    assert search(user_of("viewer"), FailedTask, "call") == {row.pk for row in rows[1:]}
