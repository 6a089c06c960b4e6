"""Import of customers: each line once despite races and killed workers, and refused lines named."""

import subprocess
from datetime import timedelta
from types import SimpleNamespace

import pytest
from django.db import transaction
from structlog.contextvars import merge_contextvars
from structlog.testing import capture_logs

from config.local.processes import wait_until
from scheduling import sql
from scheduling.customers import imports
from scheduling.customers.changes import change_customer
from scheduling.customers.erasure import continue_erasures, request_erasure
from scheduling.customers.imports import continue_imports, run_import_batch
from scheduling.errors import Conflict
from scheduling.ids import first_id_at
from scheduling.models import (
    Customer,
    CustomerChange,
    CustomerErasure,
    CustomerImport,
    CustomerImportPart,
    CustomerProfile,
    RefusedLines,
    batch_job,
)
from scheduling.operations import retention
from tests.scheduling.core.conftest import pass_time
from tests.scheduling.core.programs import is_connected, program, waits_for_a_lock
from tests.scheduling.imports.conftest import (
    check,
    finish,
    import_file,
    make_lines,
    read_names,
    read_problems,
    read_refused,
    upload,
)
from tests.support.tables import each_row
from tests.support.waiting import WAIT_LIMIT

pytestmark = pytest.mark.django_db(transaction=True)


def read_customer(user_id):
    row = Customer.objects.get(user_id=user_id)
    profile = CustomerProfile.objects.filter(pk=row.pk).first()
    found = {name: getattr(row, name) for name in ("name", "level", "locale", "timezone", "opted_out", "addresses")}
    return found | {"attributes": profile.attributes if profile else {}, "tags": profile.tags if profile else []}


# --- what is imported -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("encoding", "delimiter"), [("utf-8", ","), ("utf-8-sig", ";"), ("gb18030", "\t")])
def test_import_stores_every_field(encoding, delimiter):
    header = ["user_id", "name", "level", "locale", "timezone", "opted_out", "addresses.email", "attributes.城市",
              "attributes.paid:number", "attributes.since:instant", "tags", "note"]  # fmt: skip
    line = ["ann", "张三", "vip", "zh-hans", "Asia/Tokyo", "yes", "ann@example.com", "上海", "520.5", "2026-03-03",
            '"b|a"', "x"]  # fmt: skip
    row = import_file("\r\n".join(delimiter.join(each) for each in (header, line)).encode(encoding))

    assert (row.state, row.problems, read_refused(row)) == ("done", [], [])
    assert read_customer("ann") == {
        "name": "张三", "level": "vip", "locale": "zh-hans", "timezone": "Asia/Tokyo", "opted_out": True,
        "addresses": {"email": "ann@example.com"}, "tags": ["a", "b"],
        "attributes": {"城市": "上海", "paid": 520.5, "since": "2026-03-02T16:00:00Z"},
    }  # fmt: skip
    assert CustomerChange.objects.get().actor.startswith("ann (CSV …")
    assert not CustomerImportPart.objects.exists()


def test_check_counts_and_changes_nothing():
    change_customer("old", {"name": "Old"}, actor="x")
    change_customer("same", {"name": "Same"}, actor="x")
    before = CustomerChange.objects.count()

    row = check("user_id,name,note\nold,New,n\nsame,Same,n\nfresh,Fresh,n\n\n,Nameless,n\n")

    assert row.state == "ready"
    assert row.counts == {"lines": 4, "created": 1, "changed": 1, "unchanged": 1, "refused": 1}
    assert read_refused(row) == [(6, "user_id", "is missing")]
    assert read_names() == {"old": "Old", "same": "Same"}
    assert CustomerChange.objects.count() == before


def test_import_changes_given_cells_only():
    stored = {"name": "Ann", "addresses": {"email": "a@example.com", "phone": "1"}, "attributes": {"a": 1, "b": 2}}
    change_customer("ann", {**stored, "tags": ["t"]}, actor="x")

    row = import_file("user_id,name,addresses.phone,attributes.b:number,tags\nann,,13800138000,3,\n")

    assert row.counts["changed"] == 1
    found = read_customer("ann")
    assert (found["name"], found["tags"]) == ("Ann", ["t"])
    assert found["addresses"] == {"email": "a@example.com", "phone": "13800138000"}
    assert found["attributes"] == {"a": 1, "b": 3}
    import_file("user_id,name,addresses.email,attributes.a\nann,,,\n", empty_clears=True)
    found = read_customer("ann")
    assert (found["name"], found["addresses"], found["attributes"]) == ("", {"phone": "13800138000"}, {"b": 3})


@pytest.mark.usefixtures("short_batches")
def test_later_line_of_a_customer_wins_in_any_batch():
    lines = "".join(f"user-{number % 3},{number}\n" for number in range(35))
    import_file("user_id,name\n" + lines)
    assert read_names() == {"user-0": "33", "user-1": "34", "user-2": "32"}


@pytest.mark.usefixtures("short_batches")
def test_import_names_refused_lines_in_any_batch():
    lines = [f"user-{number},Asia/Tokyo" for number in range(35)]
    lines[3] = "user-3,Mars"
    lines[11] = '"user-11,Asia/Tokyo'
    lines[20] = "user-20"
    lines[21] = "x" * 300 + ",Mars"
    row = check("user_id,timezone\n" + "\n".join(lines))
    checked = read_refused(row)
    imports.start_import(row.pk, actor="ann")
    row = finish(row)

    assert row.counts == {"lines": 35, "created": 31, "changed": 0, "unchanged": 0, "refused": 4}
    zone = "must be a name of the IANA time zone database, such as Asia/Shanghai"
    assert read_refused(row) == checked == [
        (5, "timezone", zone), (13, "", "is no CSV: a quote is not closed or not doubled"),
        (22, "", "has 1 cells; the header has 2"), (23, "timezone", zone),
        (23, "user_id", "must not be longer than 200 characters"),
    ]  # fmt: skip


def test_import_refuses_customers_with_too_many_attributes():
    change_customer("full", {"attributes": {f"a{number}": 1 for number in range(50)}}, actor="x")
    change_customer("known", {"addresses": {f"k{number}": "x" for number in range(20)}}, actor="x")
    row = import_file("user_id,attributes.b,addresses.phone\nfull,x,\nann,x,1\nknown,,1\nbob,x,1\n")
    assert sorted(read_refused(row)) == [
        (2, "attributes", "a customer has at most 50 attributes"),
        (4, "addresses", "a customer has at most 20 addresses"),
    ]
    assert row.counts == {"lines": 4, "created": 2, "changed": 0, "unchanged": 0, "refused": 2}


# --- rubbish ----------------------------------------------------------------------------------------------------------


@each_row(
    "content, problem",
    [
        (b"PK\x03\x04" + b"\0" * 50, ("", "is an Excel workbook; save it as CSV UTF-8")),
        (bytes(range(256)) * 20, ("", "is no text file")),
        ("user_id\nann\n".encode("utf-16"), ("", "is UTF-16 text; save it as CSV UTF-8")),
        (b"user_id\n\xff\xff\xff", ("", "is neither UTF-8 nor GB18030 text")),
        (b"\n\n", ("", "is empty")),
        (b'"user_id,name\nann,Ann\n', ("", "line 1: is no CSV: a quote is not closed or not doubled")),
        (b"x" * 100_000, ("", "line 1: is longer than 65536 bytes")),
        (b"name\nAnn\n", ("user_id", "is missing")),
        (b"user_id,attributes.x:colour\n", ("attributes.x:colour", "must be one of text, number, bool, instant")),
    ],
)
def test_file_that_cannot_be_imported_is_refused_at_once(content, problem):
    row = upload(content)
    assert (row.state, read_problems(row)) == ("failed", [problem])
    assert not CustomerImportPart.objects.exists()
    with pytest.raises(Conflict):
        imports.start_import(row.pk, actor="ann")


def test_long_line_and_binary_lines_are_refused_alone():
    content = b"user_id,name\nann,Ann\nbob," + b"x" * 2_000_000 + b"\neve,\xff\xfe\nkim,a\0b\nlee,Lee\n"
    row = import_file(content, encoding="utf-8")
    assert read_names() == {"ann": "Ann", "lee": "Lee"}
    assert read_refused(row) == [
        (3, "", "is longer than 65536 bytes"), (4, "", "is no UTF-8 text"), (5, "name", "contains U+0000"),
    ]  # fmt: skip


# --- upload -----------------------------------------------------------------------------------------------------------


def test_racing_parts_are_stored_once(race):
    row = imports.create_import("a.csv", 12, actor="ann")
    race(6, lambda number: imports.store_part(row.pk, 0, b"user_id\nann\n"))
    assert CustomerImportPart.objects.count() == 1
    assert finish(row).counts == {
        "lines": 1, "created": 1, "changed": 0, "unchanged": 0, "refused": 0
    }  # fmt: skip


def test_number_of_stored_files_is_limited(monkeypatch):
    monkeypatch.setattr(imports, "MOST_OPEN", 1)
    row = imports.create_import("a.csv", 10, actor="ann")
    with pytest.raises(Conflict, match="Too many imports"):
        imports.create_import("a.csv", 10, actor="ann")
    imports.stop_import(row.pk, actor="ann")
    imports.create_import("a.csv", 10, actor="ann")


# --- stop, end and retention ------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("short_batches")
def test_stopped_import_keeps_finished_batches():
    row = check(make_lines(25))
    imports.start_import(row.pk, actor="ann")
    assert run_import_batch(row.pk)
    imports.stop_import(row.pk, actor="bob")
    assert not run_import_batch(row.pk)
    row.refresh_from_db()
    assert (row.state, row.ended_by, Customer.objects.count()) == ("stopped", "bob", 10)
    assert not CustomerImportPart.objects.exists()


def test_import_without_decision_is_discarded_after_a_day():
    waiting, incomplete, fresh = (
        check(make_lines(3)),
        imports.create_import("a.csv", 9, actor="a"),
        check(make_lines(3)),
    )
    long_past = sql.now() - imports.KEPT_UNSTARTED - timedelta(seconds=1)
    CustomerImport.objects.filter(pk__in=[waiting.pk, incomplete.pk]).update(created_at=long_past)

    assert imports.discard_stale_imports() == 2

    assert set(CustomerImportPart.objects.values_list("upload_id", flat=True)) == {fresh.pk}
    with pytest.raises(Conflict):
        imports.start_import(waiting.pk, actor="ann")


def test_ended_import_is_deleted_after_the_retention_time():
    row = import_file("user_id,timezone\nann,Mars\nbob,Asia/Tokyo\n")
    past = sql.now() - timedelta(days=400)
    old = first_id_at(past)
    RefusedLines.objects.all().delete()
    CustomerImport.objects.filter(pk=row.pk).update(id=old, ended_at=past)
    RefusedLines.objects.create(upload_id=old, entries=[[2, "timezone", "x"]])

    assert retention.delete_expired_rows()[CustomerImport._meta.db_table] == 1

    assert not RefusedLines.objects.exists()
    assert CustomerChange.objects.count() == 1


# --- erasure ----------------------------------------------------------------------------------------------------------


def test_import_does_not_bring_an_erased_customer_back():
    change_customer("ann", {"name": "Ann"}, actor="x")
    row = check("user_id,name\nann,安妮\nbob,Bob\n")
    request_erasure("ann", actor="x")
    continue_erasures()
    assert CustomerErasure.objects.get().state == "running"  # the file still has the name

    imports.start_import(row.pk, actor="ann")
    row = finish(row)

    assert read_refused(row) == [(2, "", "the customer was erased")]
    assert set(read_names()) == {"bob", f"erased:{CustomerErasure.objects.get().pk}"}
    continue_erasures()
    assert CustomerErasure.objects.get().state == "done"


def test_erasure_finds_a_customer_on_the_border_of_parts():
    for user_id in ("客户-ann", "bob"):
        change_customer(user_id, {"name": "Ann"}, actor="x")
    content = "user_id\n客户-ann\n".encode("gb18030")
    row = imports.create_import("a.csv", len(content), actor="ann")
    imports.store_part(row.pk, 0, content[:11])
    imports.store_part(row.pk, 11, content[11:])
    request_erasure("客户-ann", actor="x")
    request_erasure("bob", actor="x")  # whom no file names
    continue_erasures()
    assert [*CustomerErasure.objects.order_by("requested_at").values_list("state", flat=True)] == ["running", "done"]


def test_erasure_during_a_batch_wins(monkeypatch, second_connection):
    """The erasure commits after the batch has read the erased customers, and before it locks its own."""
    change_customer("ann", {"name": "Ann"}, actor="x")
    row = check("user_id,name\nann,安妮\nbob,Bob\n")
    imports.start_import(row.pk, actor="ann")
    change = imports.change_customers

    def erase_first(*args, **named):
        monkeypatch.setattr(imports, "change_customers", change)
        second_connection(lambda: request_erasure("ann", actor="x"))
        return change(*args, **named)

    monkeypatch.setattr(imports, "change_customers", erase_first)
    row = finish(row)

    assert row.state == "done"
    assert "ann" not in read_names()
    assert read_refused(row) == [(2, "", "the customer was erased")]


# --- races and deaths -------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("short_batches")
def test_racing_workers_import_each_line_once(race):
    row = check(make_lines(95))
    imports.start_import(row.pk, actor="ann")

    def work(number):
        batches = 0
        while CustomerImport.objects.filter(pk=row.pk, state="running").exists():
            batches += run_import_batch(row.pk)
        return batches

    assert sum(race(4, work)) == 9  # and one more, which ended it
    row.refresh_from_db()
    assert row.counts == {"lines": 95, "created": 95, "changed": 0, "unchanged": 0, "refused": 0}
    assert CustomerChange.objects.count() == 95


@pytest.mark.usefixtures("short_batches")
def test_racing_imports_of_the_same_customers_both_end(race):
    rows = [check(make_lines(60)), check(make_lines(60, start=30))]
    for row in rows:
        imports.start_import(row.pk, actor="ann")
    race(2, lambda number: finish(rows[number]))
    assert Customer.objects.count() == 90
    assert [row.state for row in rows] == ["done", "done"]
    counts = [row.counts for row in rows]
    assert sum(each["created"] for each in counts) == 90
    assert sum(each["unchanged"] for each in counts) == 30


def test_import_fails_after_max_tries(monkeypatch):
    row = check(make_lines(3))
    imports.start_import(row.pk, actor="ann")

    def crash(*args):
        raise ZeroDivisionError

    monkeypatch.setattr(imports, "run_import_lines", crash)
    for number in range(batch_job.MAX_TRIES):
        with pytest.raises(ZeroDivisionError):
            run_import_batch(row.pk)
        pass_time(seconds=10 * number + 9)
        assert not run_import_batch(row.pk), "a worker that restarts has this time"
        pass_time(seconds=1)
    assert CustomerImport.objects.get(pk=row.pk).state == "running"
    assert not run_import_batch(row.pk)
    row.refresh_from_db()
    assert (row.state, read_problems(row)) == (
        "failed", [("", "The batch at line 2 could not be finished 5 times.")],
    )  # fmt: skip
    assert not CustomerImportPart.objects.exists()


def test_import_that_fails_stops_no_other(monkeypatch):
    rows = [upload(make_lines(3)), upload(make_lines(4))]
    run = imports.run_import_lines

    def crash(row):
        if row.pk == rows[0].pk:
            raise ZeroDivisionError
        run(row)

    monkeypatch.setattr(imports, "run_import_lines", crash)
    with capture_logs(processors=[merge_contextvars]) as lines:
        continue_imports()
    assert [*CustomerImport.objects.order_by("pk").values_list("state", "tries")] == [("checking", 1), ("ready", 0)]
    (told,) = [line for line in lines if line["event"] == "batch_failed"]
    assert (told["job"], told["id"], told["place"]) == ("scheduling.customerimport", str(rows[0].pk), 2)


@pytest.mark.usefixtures("short_batches")
def test_slow_import_leaves_the_next_pass_to_the_others(monkeypatch):
    clock = [0.0]
    monkeypatch.setattr(batch_job, "time", SimpleNamespace(monotonic=lambda: clock[0]))
    for _import in range(2):
        upload(make_lines(95))
    run = imports.run_import_lines

    def run_slowly(row):
        run(row)
        clock[0] += batch_job.PASS_SECONDS

    monkeypatch.setattr(imports, "run_import_lines", run_slowly)
    done = []
    for _pass in range(4):
        continue_imports()
        counts = CustomerImport.objects.order_by("pk").values_list("counts__lines", flat=True)
        done.append([lines or 0 for lines in counts])
    assert done == [[10, 0], [10, 10], [20, 10], [20, 20]]


def test_second_worker_neither_waits_for_a_batch_nor_counts_a_try(monkeypatch, second_connection):
    """Between the count of a try and the batch no lock is held."""
    row = check(make_lines(3))
    imports.start_import(row.pk, actor="ann")
    run, count = imports.run_import_lines, batch_job.count_try
    found = []

    def work():
        found.append((run_import_batch(row.pk), CustomerImport.objects.get(pk=row.pk).tries))

    def count_and_be_overtaken(*given):
        may_run = count(*given)
        monkeypatch.setattr(batch_job, "count_try", count)
        second_connection(work)
        return may_run

    def run_beside_a_worker(row):
        second_connection(work)
        run(row)

    monkeypatch.setattr(batch_job, "count_try", count_and_be_overtaken)
    monkeypatch.setattr(imports, "run_import_lines", run_beside_a_worker)
    run_import_batch(row.pk)
    assert found == [(False, 1), (False, 1)]
    row.refresh_from_db()
    assert (row.state, row.tries) == ("done", 0)


def start_worker(row):
    """A process that runs batches of ten lines, one after another, and reports each."""
    return program(
        """
import sys
import django
django.setup()
from django.db import connection
connection.settings_dict["OPTIONS"]["application_name"] = "import"
from scheduling.customers import imports
imports.BATCH = 10
while imports.run_import_batch(sys.argv[1]):
    print("a batch", flush=True)
""",
        str(row.pk),
        stdout=subprocess.PIPE,
    )


@pytest.mark.processes
@pytest.mark.usefixtures("short_batches")
def test_worker_killed_in_a_batch_stores_nothing_of_it(second_connection):
    """It has finished the first batch and waits for a lock in the second."""
    change_customer("user-14", {"name": "x"}, actor="x")
    row = check(make_lines(25))
    imports.start_import(row.pk, actor="ann")

    with transaction.atomic():
        Customer.objects.select_for_update().get(user_id="user-14")
        with start_worker(row) as worker:
            assert wait_until(lambda: second_connection(lambda: waits_for_a_lock("import")), WAIT_LIMIT)
            assert not second_connection(lambda: run_import_batch(row.pk))  # no other worker runs it in that time
            worker.kill()
    assert wait_until(lambda: not second_connection(lambda: is_connected("import")), WAIT_LIMIT)
    row.refresh_from_db()
    assert (row.counts["lines"], Customer.objects.count()) == (10, 11)

    pass_time(seconds=10)
    continue_imports()
    row.refresh_from_db()
    assert row.state == "done"
    assert row.counts == {"lines": 25, "created": 24, "changed": 1, "unchanged": 0, "refused": 0}
    assert read_names() == {f"user-{number}": f"客户{number}" for number in range(25)}
    assert CustomerChange.objects.filter(actor__startswith="ann (CSV").count() == 25


def test_check_takes_no_lock(second_connection):
    change_customer("user-1", {"name": "x"}, actor="x")
    row = upload(make_lines(3))
    with transaction.atomic():
        Customer.objects.select_for_update().get(user_id="user-1")
        assert not second_connection(lambda: run_import_batch(row.pk))
    row.refresh_from_db()
    assert row.counts["changed"] == 1


@pytest.mark.usefixtures("short_batches")
def test_blank_lines_fill_batches_too():
    """A megabyte of them was one batch, which held the import's lock for seconds."""
    row = upload("user_id\n" + "\n" * 24 + "ann\n")
    assert [run_import_batch(row.pk) for _ in range(3)] == [True, True, False]
    row.refresh_from_db()
    assert (row.state, row.counts["lines"], row.line) == ("ready", 1, 27)
