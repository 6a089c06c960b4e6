"""Undo of an import: values from before come back, except those that another writer has changed since."""

from __future__ import annotations

import subprocess
from typing import Any

import pytest
from django.db import transaction

from config.local.processes import wait_until
from scheduling import sql
from scheduling.customers import imports
from scheduling.customers.changes import change_customer
from scheduling.customers.erasure import continue_erasures, request_erasure
from scheduling.customers.import_batches import run_import_batch
from scheduling.errors import Conflict
from scheduling.models import Customer, CustomerChange, CustomerImport, CustomerProfile
from tests.scheduling.core.programs import is_connected, program, waits_for_a_lock
from tests.scheduling.imports.conftest import check, finish, import_file, make_lines, read_names, read_refused, undo
from tests.support.second_connection import Race, SecondConnection
from tests.support.waiting import WAIT_LIMIT

pytestmark = pytest.mark.django_db(transaction=True)
HEADER = "user_id,name,level,addresses.email,addresses.phone,attributes.a:number,attributes.b,tags\n"
LINE = "ann,New,vip,new@example.com,2,2,new,new\n"
OLD = {
    "name": "Old", "level": "normal", "addresses": {"email": "old@example.com"}, "attributes": {"a": 1}, "tags": ["old"]
}  # fmt: skip


def read_values(user_id: str = "ann") -> dict[str, Any]:
    row, profile = Customer.objects.get(user_id=user_id), CustomerProfile.objects.get(customer__user_id=user_id)
    found = {name: getattr(row, name) for name in ("name", "level", "addresses")}
    return found | {"attributes": profile.attributes, "tags": profile.tags}


def test_undo_restores_every_value() -> None:
    change_customer("ann", OLD, actor="x")
    row = import_file(HEADER + LINE)
    assert read_values()["attributes"] == {"a": 2, "b": "new"}

    row = undo(row)

    assert (row.state, row.counts["undoing"]) == ("undone", {"changes": 1, "restored": 1, "kept": 0})
    assert read_values() == OLD
    last = CustomerChange.objects.latest("pk")
    assert (last.is_undo, last.import_id, last.actor.startswith("bob (CSV")) == (True, row.pk, True)


def test_undo_keeps_what_others_changed_since() -> None:
    change_customer("ann", OLD, actor="x")
    row = import_file(HEADER + LINE)
    change_customer("ann", {"level": "gold", "attributes": {"b": "other"}}, actor="eve")
    change_customer("ann", {"address_kinds": {"phone": "3"}}, actor="eve")

    row = undo(row)

    assert read_values() == OLD | {
        "level": "gold", "attributes": {"a": 1, "b": "other"}, "addresses": {"email": "old@example.com", "phone": "3"}
    }  # fmt: skip
    key = Customer.objects.get().pk
    assert read_refused(row, "undoing") == [
        (key, field, "was changed later by eve") for field in ("addresses.phone", "attributes.b", "level")
    ]


def test_undo_keeps_a_value_that_another_set_to_the_same() -> None:
    """Another writer changed the value and changed it back: it is that writer's value now."""
    change_customer("ann", {"level": "normal"}, actor="x")
    row = import_file("user_id,level\nann,vip\n")
    change_customer("ann", {"level": "gold"}, actor="eve")
    change_customer("ann", {"level": "vip"}, actor="eve")
    row = undo(row)
    assert (Customer.objects.get().level, row.counts["undoing"]["kept"]) == ("vip", 1)


def test_undo_keeps_a_later_value_that_python_takes_for_the_same() -> None:
    """For Python `True == 1`."""
    row = import_file("user_id,attributes.member:bool\nann,yes\n")
    change_customer("ann", {"attributes": {"member": 1}}, actor="eve")

    row = undo(row)

    assert read_refused(row, "undoing") == [
        (Customer.objects.get().pk, "attributes.member", "was changed later by eve")
    ]
    assert read_values()["attributes"]["member"] is not True


@pytest.mark.parametrize("old", [1, 1.0])
def test_undo_restores_a_value_that_python_takes_for_the_same(old: float) -> None:
    change_customer("ann", {"attributes": {"member": old}}, actor="x")
    row = undo(import_file("user_id,attributes.member:bool\nann,yes\n"))
    assert row.counts["undoing"] == {"changes": 1, "restored": 1, "kept": 0}
    member = read_values()["attributes"]["member"]
    assert (type(member), member) == (type(old), old)


def test_undo_keeps_a_value_that_was_written_without_history() -> None:
    row = import_file("user_id,attributes.member:bool\nann,yes\n")
    CustomerProfile.objects.update(attributes={"member": 1})
    row = undo(row)
    assert [entry[1:] for entry in read_refused(row, "undoing")] == [("attributes.member", "was changed later")]


@pytest.mark.usefixtures("short_batches")
def test_undo_of_several_lines_of_a_customer_restores_the_first_value() -> None:
    change_customer("ann", {"name": "Old"}, actor="x")
    lines = "".join(f"ann,New {number}\nuser-{number},x\n" for number in range(30))
    row = import_file("user_id,name\n" + lines)
    assert CustomerChange.objects.filter(customer__user_id="ann").count() > 3
    undo(row)
    assert read_names()["ann"] == "Old"


def test_undo_keeps_opt_outs_and_restores_them() -> None:
    change_customer("bob", {"opted_out": True}, actor="x")
    since = Customer.objects.get(user_id="bob").opted_out_at
    row = import_file("user_id,opted_out\nann,yes\nbob,no\n")
    row = undo(row)
    assert since == Customer.objects.get(user_id="bob").opted_out_at
    assert set(Customer.objects.values_list("user_id", "opted_out")) == {("ann", True), ("bob", True)}
    assert [entry[1:] for entry in read_refused(row, "undoing")] == [
        ("opted_out", "an opt-out stays: the customer may have confirmed it since")
    ]


def test_undo_empties_customers_that_the_import_created() -> None:
    row = undo(import_file(HEADER + LINE))
    assert row.counts["undoing"]["restored"] == 1
    assert read_values() == {"name": "", "level": "", "addresses": {}, "attributes": {}, "tags": []}


def test_undo_of_the_earlier_import_keeps_values_of_the_later_one() -> None:
    first = import_file("user_id,name,level\nann,One,one\n")
    second = import_file("user_id,name\nann,Two\n")
    first = undo(first)
    assert (read_names(), first.counts["undoing"]["kept"]) == ({"ann": "Two"}, 1)
    undo(second)
    assert read_names() == {"ann": "One"}


def test_undo_keeps_what_would_exceed_the_limit() -> None:
    change_customer("ann", {"attributes": {"old": 1}}, actor="x")
    row = import_file("user_id,attributes.old\nann,\n", empty_clears=True)
    change_customer("ann", {"attributes": {f"a{number}": 1 for number in range(50)}}, actor="eve")
    row = undo(row)
    assert (row.state, row.counts["undoing"]["kept"]) == ("undone", 1)


def test_undo_skips_erased_customers() -> None:
    row = import_file(make_lines(3))
    request_erasure("user-1", actor="x")
    continue_erasures()
    row = undo(row)
    assert row.counts["undoing"]["restored"] == 2
    assert "客户1" not in read_names().values()


def test_undo_happens_once(race: Race) -> None:
    row = import_file(make_lines(3))

    def start(number: int) -> bool:
        try:
            imports.undo_import(row.pk, actor="bob")
        except Conflict:
            return False
        return True

    assert sum(race(4, start)) == 1
    finish(row)
    with pytest.raises(Conflict):
        imports.undo_import(row.pk, actor="bob")


def test_undo_of_an_import_without_changes_is_refused() -> None:
    import_file(make_lines(3))
    row = import_file(make_lines(3))
    with pytest.raises(Conflict, match="changed no customer"):
        imports.undo_import(row.pk, actor="bob")


@pytest.mark.usefixtures("short_batches")
def test_undo_of_a_stopped_import_restores_its_batches() -> None:
    row = check(make_lines(25))
    imports.start_import(row.pk, actor="ann")
    run_import_batch(row.pk)
    imports.stop_import(row.pk, actor="ann")
    row.refresh_from_db()
    assert undo(row).counts["undoing"]["restored"] == 10


@pytest.mark.usefixtures("short_batches")
def test_undo_racing_edits_keeps_each_edit(race: Race) -> None:
    """Edits before and after the undo's lock: none is overwritten."""
    row = import_file(make_lines(60))
    imports.undo_import(row.pk, actor="bob")

    def act(number: int) -> None:
        if number == 0:
            finish(row)
        else:
            for place in range(number - 1, 60, 2):
                change_customer(f"user-{place}", {"name": f"edit {place}"}, actor="eve")

    race(3, act)
    assert read_names() == {f"user-{place}": f"edit {place}" for place in range(60)}
    assert row.state == "undone"
    counts = row.counts["undoing"]
    kept_names = [entry for entry in read_refused(row, "undoing") if entry[1] == "name"]
    assert (counts["changes"], counts["kept"]) == (60, len(kept_names))
    assert set(Customer.objects.values_list("level", flat=True)) == {""}


@pytest.mark.processes
@pytest.mark.usefixtures("short_batches")
def test_worker_killed_in_an_undo_loses_and_repeats_nothing(second_connection: SecondConnection) -> None:
    for number in range(25):
        change_customer(f"user-{number}", {"name": "Old"}, actor="x")
    row = import_file(make_lines(25))
    imports.undo_import(row.pk, actor="bob")
    text = """
import sys
import django
django.setup()
from django.db import connection
connection.settings_dict["OPTIONS"]["application_name"] = "undo"
from scheduling.customers import import_batches
import_batches.BATCH = 10
while import_batches.run_import_batch(sys.argv[1]):
    pass
"""
    twelfth = CustomerChange.objects.filter(import_id=row.pk).order_by("-pk")[12]  # in the second batch of the undo
    with transaction.atomic():
        Customer.objects.select_for_update().get(pk=twelfth.customer_id)
        with program(text, str(row.pk), stdout=subprocess.PIPE) as worker:
            assert wait_until(lambda: second_connection(lambda: waits_for_a_lock("undo")), WAIT_LIMIT)
            worker.kill()
    assert wait_until(lambda: not second_connection(lambda: is_connected("undo")), WAIT_LIMIT)
    row.refresh_from_db()
    assert row.counts["undoing"]["restored"] == 10

    CustomerImport.objects.filter(pk=row.pk).update(next_at=sql.now())
    row = finish(row)
    assert row.counts["undoing"] == {"changes": 25, "restored": 25, "kept": 0}
    assert set(read_names().values()) == {"Old"}
    assert CustomerChange.objects.filter(is_undo=True).count() == 25
