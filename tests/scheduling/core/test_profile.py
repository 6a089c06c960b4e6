"""Attributes and tags of customers: types, limits, and the search for a part of a name."""

from datetime import UTC, datetime

import pytest
from django.db import connection

from scheduling.models import Customer, CustomerProfile
from scheduling.policy.profile import (
    InvalidValue,
    read_value,
    store_value,
)
from tests.support.tables import each_row

NOON = datetime(2026, 3, 3, 12, tzinfo=UTC)


@each_row(
    "given, back",
    [
        *((value, value) for value in ("上海", "", 5, -2.5, 2**63 - 1, True, False, NOON, NOON.replace(microsecond=7))),
        *((text, text) for text in ("2026-03-03", "2026-03-03T12:00:00", "at 2026-03-03T12:00:00Z")),
        *((text, NOON) for text in ("2026-03-03T20:00:00+08:00", "2026-03-03t12:00:00z", "2026-03-03T12:00:00.000Z")),
    ],
)
def test_value_keeps_its_type_and_an_instant_has_one_stored_form(given, back):
    found = read_value(store_value(given))
    assert (found, type(found)) == (back, type(back))
    if back == NOON:
        assert store_value(given) == "2026-03-03T12:00:00Z"


@each_row(
    "value", ["x" * 257, "a\0", "\ud800", "a\nb", 2**63, float("inf"), float("nan"), [], {}, "2026-13-01T00:00:00Z",
              "0001-01-01T00:00:00+08:00", "2026-01-01T00:00:00+99:00", datetime(2026, 1, 1)],  # noqa: DTZ001
)  # fmt: skip
def test_store_value_beyond_the_limits_is_refused(value):
    with pytest.raises(InvalidValue):
        store_value(value)


@pytest.mark.django_db
def test_name_of_a_customer_is_copied_for_the_search():
    ann = Customer.objects.create(user_id="ann", name="欧阳小明")
    assert CustomerProfile.objects.get().name == "欧阳小明"
    Customer.objects.filter(pk=ann.pk).update(name="")
    assert CustomerProfile.objects.get().name == ""
    with connection.cursor() as cursor:
        cursor.execute("SELECT scheduling_name_parts('Aba'), scheduling_name_parts('')")
        assert cursor.fetchone() == (["a", "ab", "b", "ba"], [])
