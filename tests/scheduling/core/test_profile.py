"""Attributes and tags of customers: types, limits, and the search for a part of a name."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

import pytest
from django.db import connection

from scheduling.ledger import locks
from scheduling.models import Customer, CustomerProfile
from scheduling.policy.profile import (
    InvalidValue,
    Profile,
    check_attribute_name,
    merge_attributes,
    normalize_tags,
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
def test_value_keeps_its_type_and_an_instant_has_one_stored_form(given: Any, back: Any) -> None:
    found = read_value(store_value(given))
    assert (found, type(found)) == (back, type(back))
    if back == NOON:
        assert store_value(given) == "2026-03-03T12:00:00Z"


@each_row(
    "value", ["x" * 257, "a\0", "\ud800", "a\nb", 2**63, float("inf"), float("nan"), [], {}, "2026-13-01T00:00:00Z",
              "0001-01-01T00:00:00+08:00", "2026-01-01T00:00:00+99:00", datetime(2026, 1, 1)],  # noqa: DTZ001
)  # fmt: skip
def test_store_value_beyond_the_limits_is_refused(value: Any) -> None:
    with pytest.raises(InvalidValue):
        store_value(value)


def test_attribute_name_is_one_that_a_path_can_name() -> None:
    for name in ("city", "首单_金额", "a1", "Größe"):
        check_attribute_name(name)
    for name in ("", "1a", "_a", "a b", "a.b", "a-b", "x" * 65):
        with pytest.raises(InvalidValue):
            check_attribute_name(name)


def test_merge_attributes_with_null_removes_one_and_is_bounded() -> None:
    assert merge_attributes({"a": 1, "b": 2}, {"a": None, "c": "x"}) == {"b": 2, "c": "x"}
    full = {f"a{number}": number for number in range(50)}
    assert len(merge_attributes(full, {"a0": None, "b": 1})) == 50
    with pytest.raises(InvalidValue, match="50"):
        merge_attributes(full, {"b": 1})


def test_normalize_tags_sorts_and_bounds_them() -> None:
    assert normalize_tags(["vip", "new", "vip"]) == ["new", "vip"]
    for wrong in ([""], [" a"], ["x" * 65], ["a\n"], [str(number) for number in range(51)]):
        with pytest.raises(InvalidValue):
            normalize_tags(wrong)


@pytest.mark.django_db
def test_load_profiles_returns_typed_values_of_those_that_have_one() -> None:
    ann = Customer.objects.create(user_id="ann")
    bob = Customer.objects.create(user_id="bob")
    CustomerProfile.objects.create(
        customer=ann, attributes={"city": "上海", "since": "2026-03-03T12:00:00Z"}, tags=["vip"]
    )
    profile = Profile({"city": "上海", "since": NOON}, ("vip",))
    assert locks.load_profiles([bob.pk, ann.pk]) == {ann.pk: profile}
    assert ann.spec().profile == profile
    assert bob.spec().profile == Profile()


@pytest.mark.django_db
def test_name_of_a_customer_is_copied_for_the_search() -> None:
    ann = Customer.objects.create(user_id="ann", name="欧阳小明")
    assert CustomerProfile.objects.get().name == "欧阳小明"
    Customer.objects.filter(pk=ann.pk).update(name="")
    assert CustomerProfile.objects.get().name == ""
    with connection.cursor() as cursor:
        cursor.execute("SELECT scheduling_name_parts('Aba'), scheduling_name_parts('')")
        assert cursor.fetchone() == (["a", "ab", "b", "ba"], [])
