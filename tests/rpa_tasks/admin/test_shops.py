"""The board of shops, platforms, flows and schedules."""

import json
import re
from datetime import timedelta

import psycopg
import pytest
from django.contrib.admin.models import LogEntry
from django.contrib.auth.models import Group, Permission, User
from django.db import IntegrityError, connection
from django.urls import reverse
from django.utils.timezone import now
from django_celery_beat.models import IntervalSchedule, PeriodicTask

from rpa_tasks.admin.shop import ShopForm
from rpa_tasks.jobs.shops import unpin_matching_shops
from rpa_tasks.models import ExecutionNode, Flow, Job, Lane, LoginState, Platform, Shop
from rpa_tasks.takeover.leases import start_take_over
from scheduling.models import AuditEntry
from tests.rpa_tasks.admin.conftest import messages_of, text, url
from tests.scheduling.admin.conftest import interrupt
from tests.scheduling.api.serving import database_url
from tests.support.tables import each_row
from tests.support.undrawn import read_context, read_refusal


@pytest.fixture
def editor(editor):
    """May define commands of flows as well."""
    user = User.objects.get(username="editor")
    user.groups.add(Group.objects.get(name="command editor"))
    return editor


pytestmark = pytest.mark.django_db


def row_of(client, shop):
    """Return the text of one shop on the board."""
    return text(client.get(f"{url('shop_live')}?ids={shop.pk}"))


def test_shop_row_shows_most_urgent_state(viewer, market):
    assert "Idle" in row_of(viewer, market.s1)
    market.failed("s1")
    assert "Last run failed" in row_of(viewer, market.s1)
    Lane.objects.filter(shop=market.s1).update(last_success_at=now() + timedelta(seconds=1))
    assert "Idle" in row_of(viewer, market.s1)
    market.waiting("s1")
    assert "Waiting" in row_of(viewer, market.s1)
    market.running("s2")
    for words in ("Running", "40 %", "page 4", "for 1 minute"):
        assert words in row_of(viewer, market.s2)
    breaker = market.pdd.breaker
    breaker.open_until = now() + timedelta(minutes=1)
    breaker.save()
    assert "Resting" in row_of(viewer, market.s1)
    Shop.objects.filter(pk=market.s1.pk).update(backlog_limit=1)
    assert "Backlog full" in row_of(viewer, market.s1)
    Shop.objects.filter(pk=market.s1.pk).update(paused=True)
    assert "Paused" in row_of(viewer, market.s1)
    Shop.objects.filter(pk=market.s1.pk).update(login_state=LoginState.NEEDED, login_lost_at=now())
    assert "Login needed" in row_of(viewer, market.s1)


def test_shop_list_query_count_is_constant(viewer, market, django_assert_max_num_queries):
    for number in range(30):
        market.shop(f"x{number}")
    with django_assert_max_num_queries(22):
        viewer.get(url("shop_changelist"))


def test_action_of_open_page_after_retirement_names_it(operator, market):
    """The page was open before: its buttons are still there."""
    market.shop("s3", paused=True, login_state=LoginState.NEEDED, retired_at=now())
    gone = Shop.objects.get(shop_id="s3")
    for name in ("pause_row", "resume_row", "confirm_login"):
        assert "was retired" in messages_of(operator.post(url(f"shop_{name}", gone.pk))), name
    user = User.objects.get(username="operator")
    ExecutionNode.objects.create(name="n1", seen_at=now(), started_at=now(), slots=1)
    Shop.objects.filter(pk=gone.pk).update(retired_at=None)
    row = start_take_over(gone.pk, user=user, address="")
    Shop.objects.filter(pk=gone.pk).update(retired_at=now())
    answer = operator.post(url("shop_take_over", gone.pk), {"do": "continue"})
    assert (answer.status_code, answer.url) == (302, url("shop_change", gone.pk))
    assert messages_of(answer).endswith("The shop is retired.")
    row.refresh_from_db()
    assert row.wanted_end == "ended"


def test_leave_home_releases_shop_from_its_node(operator, market):
    Lane.objects.filter(shop=market.s1).update(home="n1")
    page, leave = url("shop_change", market.s1.pk), url("shop_leave_home", market.s1.pk)
    assert leave in text(operator.get(page))
    assert "n1" in text(operator.get(leave))
    assert "takes the shop" in messages_of(operator.post(leave))
    assert Lane.objects.get(shop=market.s1).home == ""
    assert "no preferred node" in messages_of(operator.post(leave))
    assert leave not in text(operator.get(page))


def test_release_selected_confirms_and_releases_chosen_shops(operator, market):
    Lane.objects.update(home="n1")
    chosen = {"action": "release_selected", "_selected_action": [market.s1.pk]}
    page = text(operator.post(url("shop_changelist"), chosen))
    assert "n1: 1" in page
    assert f'name="_selected_action" value="{market.s1.pk}"' in page
    assert set(Lane.objects.values_list("home", flat=True)) == {"n1"}
    answer = operator.post(url("shop_changelist"), {**chosen, "confirmed": "1"})
    assert "1 shops are free to move" in messages_of(answer)
    assert {lane.shop_id: lane.home for lane in Lane.objects.all()} == {market.s1.pk: "", market.s2.pk: "n1"}


def test_each_released_shop_has_an_audit_entry(market):
    """One entry for all named the first few shops, and the last of them by half of its number."""
    found = [market.s1, market.s2, *(market.shop(f"t{number}") for number in range(50))]
    Lane.objects.update(home="n1")
    assert unpin_matching_shops(by="api: ops", node="n1").released == len(found)
    entries = AuditEntry.objects.filter(kind="rpa_tasks.shop", actor="api: ops", reason="released from its node")
    assert set(entries.values_list("object_id", "label")) == {(str(shop.pk), str(shop)) for shop in found}


def test_pause_changes_only_by_buttons(editor, market):
    for name, row in (("shop", market.s1), ("platform", market.pdd)):
        page = text(editor.get(url(f"{name}_change", row.pk)))
        assert 'name="paused"' not in page
        assert url(f"{name}_pause_row", row.pk) in page
        assert url(f"{name}_resume_row", row.pk) not in page
        assert "Paused." in messages_of(editor.post(url(f"{name}_pause_row", row.pk)))
        assert "already set" in messages_of(editor.post(url(f"{name}_pause_row", row.pk)))
        row.refresh_from_db()
        assert row.paused
        editor.post(url(f"{name}_resume_row", row.pk))
        row.refresh_from_db()
        assert not row.paused


def shown_version(editor, name, row):
    return str(read_context(editor, url(f"{name}_change", row.pk))["adminform"].form["row_version"].value())


def test_form_of_shop_named_like_a_tier_refuses_own_queue(editor, market):
    """The form of a shop shows its id and does not post it."""
    shop = Shop.objects.create(platform=market.pdd, shop_id="high")
    form = {"backlog_limit": "100", "dedicated_queue": "on", "row_version": shown_version(editor, "shop", shop)}
    answer = editor.post(url("shop_change", shop.pk), form)
    assert (answer.status_code, "“high” is a queue of all shops" in text(answer)) == (200, True)
    shop.refresh_from_db()
    assert not shop.dedicated_queue


@pytest.mark.parametrize("field", ["retired_at", "profile_id"])
def test_shop_edit_keeps_concurrent_changes(editor, market, monkeypatch, field):
    """Of a field that the form does not have, and of one that it has."""
    value = {"retired_at": now(), "profile_id": "moved"}[field]
    form = {
        "name": "New", "backlog_limit": "100", "profile_id": "", "row_version": shown_version(editor, "shop", market.s1)
    }  # fmt: skip
    interrupt(monkeypatch, ShopForm, lambda: Shop.objects.filter(pk=market.s1.pk).update(**{field: value}))
    answer = editor.post(url("shop_change", market.s1.pk), form)
    market.s1.refresh_from_db()
    assert getattr(market.s1, field) == value
    if field == "profile_id":
        assert (answer.status_code, "Reload the page" in text(answer), market.s1.name) == (200, True, "")
        return
    assert (answer.status_code, market.s1.name, market.s1.version) == (302, "New", 2)
    assert getattr(market.s1.history.latest(), field) == value


def test_run_now_reports_result_for_each_shop(editor, market):
    market.waiting("s2")
    full = market.shop("s3", backlog_limit=1)
    market.waiting("s3", dedupe_key="other")
    retired = market.shop("s4", retired_at=now())
    chosen = [market.s1, market.s2, full, retired]
    begun = editor.post(
        url("shop_changelist"), {"action": "run_selected", "_selected_action": [str(shop.pk) for shop in chosen]}
    )
    page = read_context(editor, begun["location"])
    assert page["form"].fields["task_type"].choices == [("sync_order", "sync_order")]
    told = editor.post(begun["location"], {"task_type": "sync_order", "priority": "0", "payload": '{"day": 1}'})
    outcome = told.context["outcome"]
    assert [shop.pk for shop, _receipt in outcome.published] == [market.s1.pk]
    assert [shop.pk for shop, _receipt in outcome.merged] == [market.s2.pk]
    assert [(shop.pk, why) for shop, why in outcome.refused] == [
        (full.pk, "pdd/s3: 1 jobs wait already, no more are taken.")
    ]
    job = Job.objects.get(shop=market.s1)
    assert (job.payload, job.priority, job.source) == ({"day": 1}, 0, "admin: editor")


@pytest.mark.django_db(transaction=True)
def test_run_now_names_a_shop_whose_job_another_transaction_holds(editor, market):
    """It waited for the lock, and after an error no page named what was published."""
    market.waiting("s1")
    with psycopg.connect(database_url()) as other:
        other.execute("SELECT FROM rpa_tasks_job FOR NO KEY UPDATE")
        page = f"{url('shop_run_now_many')}?shops={market.s1.pk},{market.s2.pk}"
        told = editor.post(page, {"task_type": "sync_order", "priority": "0", "payload": ""})
    outcome = told.context["outcome"]
    assert [shop.pk for shop, _receipt in outcome.published] == [market.s2.pk]
    assert outcome.refused == [(market.s1, "The database is busy. Run it again for this shop.")]


def test_run_now_without_common_task_type_is_refused(operator, market):
    other = Platform.objects.create(key="temu")
    Flow.objects.create(platform=other, task_type="reply", command=["true", "{param}"])
    shop = Shop.objects.create(platform=other, shop_id="t1")
    page = text(operator.get(f"{url('shop_run_now_many')}?shops={market.s1.pk},{shop.pk}"))
    assert "no task type in common" in page
    assert "No shop was chosen" in text(operator.get(f"{url('shop_run_now_many')}?shops=999,x"))


def test_run_now_by_operator_keeps_waiting_payload(operator, market):
    """A user who may run but not edit changes no settings of others."""
    job = market.waiting("s1", payload={"since": "monday"}, priority=2)
    address = f"{url('shop_run_now_many')}?shops={market.s1.pk},{market.s2.pk}"
    assert "payload" not in read_context(operator, address)["form"].fields
    operator.post(address, {"task_type": "sync_order", "priority": "0", "payload": '{"since": "ever"}'})
    job.refresh_from_db()
    assert (job.payload, job.priority, job.requests) == ({"since": "monday"}, 0, 2)
    assert Job.objects.get(shop=market.s2).payload == {}


def test_open_breaker_is_shown_and_closed_by_button(operator, market):
    assert url("platform_close_breaker", market.pdd.pk) not in text(operator.get(url("platform_change", market.pdd.pk)))
    breaker = market.pdd.breaker
    breaker.errors, breaker.open_until, breaker.opened_at = 3, now() + timedelta(minutes=5), now()
    breaker.save()
    page = text(operator.get(url("platform_change", market.pdd.pk)))
    assert "open until" in page
    assert url("platform_close_breaker", market.pdd.pk) in page
    breaker.open_until = now() - timedelta(seconds=1)
    breaker.save()
    assert "half open" in text(operator.get(url("platform_changelist")))
    assert "is closed" in messages_of(operator.post(url("platform_close_breaker", market.pdd.pk)))
    assert "already closed" in messages_of(operator.post(url("platform_close_breaker", market.pdd.pk)))


def test_shop_form_refuses_used_profile(editor, market):
    form = {"platform": market.pdd.pk, "shop_id": "s9", "backlog_limit": "100", "profile_id": "pdd-s1"}

    def list_errors(**changes):
        return str(read_refusal(editor, url("shop_add"), form | changes)["adminform"].form.errors)

    assert "belongs to pdd/s1" in list_errors()
    assert "must start with a letter" in list_errors(shop_id="a/b", profile_id="")
    assert editor.post(url("shop_add"), {**form, "profile_id": ""}).status_code == 302
    assert Shop.objects.get(shop_id="s9").profile == "pdd-s9"
    again = editor.post(url("shop_change", market.s1.pk), {"name": "New", "backlog_limit": "5", "profile_id": ""})
    assert again.status_code == 302
    market.s1.refresh_from_db()
    assert (market.s1.name, market.s1.version) == ("New", 2)


FLOW = {
    "task_type": "reply", "command": 'true\n{param}\n""\n', "timeout": "10m", "dedupe_by": "payload",
    "param_style": "nested", "dedupe_window": "1d", "dedupe_rerun": "refuse", "idempotent": "False",
    "exit_codes": "business=65 66, session=77", "retry_delays": "30s, 1m", "payload_schema": '{"type": "object"}',
    "environment": "DATABASE_URL", "cwd": "/opt/rpa", "env": "B=2\n A = x=y ",
}  # fmt: skip


def test_flow_form_reads_and_keeps_line_format(editor, market):
    assert editor.post(url("flow_add"), {**FLOW, "platform": market.pdd.pk}).status_code == 302
    flow = Flow.objects.get(task_type="reply")
    assert flow.command == ["true", "{param}", ""]
    assert flow.exit_codes == {"business": [65, 66], "session": [77]}
    assert (flow.cwd, flow.env) == ("/opt/rpa", {"A": "x=y", "B": "2"})
    assert flow.retry_delays == [30, 60]
    assert (flow.param_style, flow.idempotent) == ("nested", False)
    assert (flow.dedupe_window, flow.dedupe_rerun) == (timedelta(days=1), "refuse")
    page = editor.get(url("flow_change", flow.pk))
    form = page.context["adminform"].form
    assert form["command"].value() == 'true\n{param}\n""'
    assert re.search(r'at-typed">true &#x27;{.*}&#x27; &#x27;&#x27;</code>', text(page))
    kept = {name: form[name].value() for name in FLOW if name in form.fields}
    assert editor.post(url("flow_change", flow.pk), kept).status_code == 302
    flow.refresh_from_db()
    assert flow.version == 1, "saving it as it stands changes nothing"


@each_row(
    "field, value, words",
    [("command", "sh\n-c\nrun {param}", "a word of its own"), ("command", '"open', "not a JSON text"),
     ("exit_codes", "business=65, session=65", "listed already"), ("exit_codes", "business=a", "must be numbers"),
     ("payload_schema", '{"type": "nonsense"}', "nonsense"), ("idempotent", "", "required"),
     ("environment", "DJANGO_SECRET_KEY", "never given"), ("env", "A", "must look like NAME=value"),
     ("env", "A=1\nA=2", "there twice"), ("env", 'A="x', "not a JSON text")],
)  # fmt: skip
def test_flow_form_shows_errors_at_fields(editor, market, field, value, words):
    """Those of its own format, and some of the rules; `rpa_tasks/api/test_validation` has all of these."""
    page = read_refusal(editor, url("flow_add"), {**FLOW, "platform": market.pdd.pk, field: value})
    assert words in str(page["adminform"].form.errors[field])
    assert not Flow.objects.filter(task_type="reply").exists()


def test_commands_need_a_right_beside_that_to_edit_flows(as_member, market):
    change, add = url("flow_change", market.sync.pk), url("flow_add")
    form = {**FLOW, "command": "/bin/sh\n{param}", "timeout": "77s", "path": "/opt/tools"}
    new = {**form, "platform": market.pdd.pk, "task_type": "another"}

    editor = as_member("editor")
    assert editor.post(change, form).status_code == 302
    assert editor.post(add, new).status_code == 403
    flow = Flow.objects.get()
    assert (flow.timeout, flow.param_style) == (timedelta(seconds=77), "nested")
    kept = flow.command, flow.path, flow.cwd, flow.environment, flow.exit_codes, flow.env
    assert kept == (["true", "{param}"], [], "", [], {}, {})

    viewer = as_member("viewer")
    Group.objects.get(name="viewer").permissions.add(Permission.objects.get(codename="define_command"))
    assert viewer.post(change, form).status_code == 403

    commander = as_member("command editor")
    assert [commander.post(*each).status_code for each in ((change, form), (add, new))] == [302, 302]
    for flow in Flow.objects.all():
        assert (flow.command, flow.path, flow.environment) == (["/bin/sh", "{param}"], ["/opt/tools"], ["DATABASE_URL"])


def test_save_that_is_tried_again_warns_once(as_member, market, monkeypatch):
    checks = iter([IntegrityError("its reference is gone")])

    def check_constraints():
        for error in checks:
            raise error

    monkeypatch.setattr(connection, "check_constraints", check_constraints)
    client, form = as_member("command editor"), {**FLOW, "command": "/nowhere/program\n{param}"}
    page = client.post(url("flow_change", market.sync.pk), form, follow=True)
    assert [str(each).count("cannot be started") for each in page.context["messages"]].count(1) == 1


def test_values_of_fixed_variables_are_shown_to_editors_of_commands_only(as_member, market):
    """Also on the pages of its history, which need only the right to view."""
    flow = market.sync
    for value in ("first-value", "second-value"):
        flow.env = {"PORTAL": value}
        flow.save()
    pages = [url("flow_change", flow.pk), url("flow_history", flow.pk)]
    pages += [url("flow_simple_history", flow.pk, each.pk) for each in flow.history.all()]
    for role in ("viewer", "editor", "admin"):
        client = as_member(role)
        shown = [text(client.get(page)) for page in pages]
        assert [page for page in shown if "PORTAL" not in page] == [shown[-1]], role  # the version before both
        leaks = [
            page for page, body in zip(pages, shown, strict=True) if "first-value" in body or "second-value" in body
        ]
        assert leaks == ([pages[0]] if role == "admin" else []), role


def test_flow_form_keeps_values_that_a_line_cannot_hold(editor, market):
    """They come from a configuration file, and an edit of something else stores the whole form."""
    env = {"KEY": "-----BEGIN\nA=1\n", "GAP": " x ", "QUOTED": '"x"', "EMPTY": ""}
    Flow.objects.filter(pk=market.sync.pk).update(env=env)
    page = url("flow_change", market.sync.pk)
    form = editor.get(page).context["adminform"].form
    kept = {name: form[name].value() or "" for name in FLOW if name in form.fields}
    assert editor.post(page, {**kept, "idempotent": "False", "timeout": "77s"}).status_code == 302
    flow = Flow.objects.get()
    assert (flow.timeout, flow.env) == (timedelta(seconds=77), env)


def test_number_of_an_address_that_is_too_long_names_no_row(editor, market):
    """Python reads at most 4,300 digits."""
    long = "1" * 5_000
    assert "No shop was chosen" in text(editor.get(url("shop_run_now_many"), {"shops": long}))
    assert editor.get(url("shop_change", long), follow=True).status_code == 200  # Django names the missing row
    receivers = reverse("admin:scheduling_channelconfig_receivers")
    assert editor.get(receivers, {"page": long}).context["previous"] == 0


SCHEDULE = {
    "every": "10", "spread": "10", "shops": "", "priority": "normal", "payload": "", "name": "", "enabled": "on",
}  # fmt: skip


def test_schedule_form_creates_edits_and_deletes_periodic_task(editor, market):
    editor.post(url("shop_schedule_add"), {**SCHEDULE, "flow": market.sync.pk})
    row = PeriodicTask.objects.get(task="rpa_tasks.publish_for_shops")
    assert json.loads(row.kwargs) == {
        "platform": "pdd", "task_type": "sync_order", "shops": "all", "priority": "normal", "payload": {},
        "spread_seconds": 600,
    }  # fmt: skip
    assert (str(row.interval), row.enabled) == ("every 10 minutes", True)
    assert row.name == "pdd_sync_order: all shops, every 10 min"
    assert row.name in text(editor.get(url("shop_schedules")))
    form = editor.get(url("shop_schedule", row.pk)).context["form"]
    assert (form["every"].value(), form["spread"].value(), form["flow"].value()) == (10, "10", market.sync.pk)
    changed = {**SCHEDULE, "flow": market.sync.pk, "shops": "s1, s2", "every": "30", "enabled": ""}
    editor.post(url("shop_schedule", row.pk), changed)
    row.refresh_from_db()
    told = json.loads(row.kwargs)["shops"], str(row.interval), row.enabled
    assert told == (["s1", "s2"], "every 30 minutes", False)
    editor.post(url("shop_schedule", row.pk), {"delete": "1"})
    assert not PeriodicTask.objects.filter(pk=row.pk).exists()
    entries = list(AuditEntry.objects.filter(kind="django_celery_beat.periodictask").order_by("pk"))
    assert [(each.action, each.actor, each.object_id) for each in entries] == [
        (action, "editor", str(row.pk)) for action in ("added", "changed", "deleted")
    ]
    assert [each[0] for each in entries[1].changes] == ["name", "enabled", "interval", "kwargs"]
    assert entries[1].changes[1:3] == [
        ["enabled", "True", "False"],
        ["interval", "every 10 minutes", "every 30 minutes"],
    ]


def test_schedule_form_takes_one_of_two_equal_intervals(editor, market):
    for _ in range(2):
        IntervalSchedule.objects.create(every=10, period="minutes")
    assert editor.post(url("shop_schedule_add"), {**SCHEDULE, "flow": market.sync.pk}).status_code == 302
    row = PeriodicTask.objects.get()
    assert str(row.interval) == "every 10 minutes"
    for other in IntervalSchedule.objects.all():
        PeriodicTask.objects.update(interval=other)
        form = {**SCHEDULE, "flow": market.sync.pk, "name": f"at {other.pk}"}
        assert editor.post(url("shop_schedule", row.pk), form).status_code == 302
        row.refresh_from_db()
        assert (row.name, row.interval) == (f"at {other.pk}", other), "it stays at its own"


def test_schedule_form_overwrites_no_later_edit(editor, market):
    editor.post(url("shop_schedule_add"), {**SCHEDULE, "flow": market.sync.pk})
    row = PeriodicTask.objects.get()
    address = url("shop_schedule", row.pk)
    shown = editor.get(address).context["form"]["row_version"].value()
    ran = now()
    PeriodicTask.objects.update(last_run_at=ran)  # by beat: no edit
    first = {**SCHEDULE, "flow": market.sync.pk, "every": "30", "row_version": shown}
    assert editor.post(address, first).status_code == 302
    page = read_refusal(editor, address, {**first, "every": "45"})
    assert "Changed after you opened the page" in str(page["form"].non_field_errors())
    row.refresh_from_db()
    assert (str(row.interval), row.last_run_at) == ("every 30 minutes", ran)


def test_schedule_form_refuses_values_that_cannot_run(editor, market):
    form = {**SCHEDULE, "flow": market.sync.pk, "name": "taken"}
    editor.post(url("shop_schedule_add"), form)
    for field, value, words in (
        ("shops", "s1, nobody", "nobody"), ("payload", "[", "not JSON"), ("every", "0", "greater than"),
        ("name", "taken", "already"),
    ):  # fmt: skip
        page = read_refusal(editor, url("shop_schedule_add"), {**form, "name": "", field: value})
        assert words in str(page["form"].errors[field])
    assert PeriodicTask.objects.filter(task="rpa_tasks.publish_for_shops").count() == 1


def test_schedule_pages_name_retired_shops_and_ignore_other_periodic_tasks(editor, market):
    editor.post(url("shop_schedule_add"), {**SCHEDULE, "flow": market.sync.pk, "shops": "s2"})
    Shop.objects.filter(pk=market.s2.pk).update(retired_at=now())
    every = IntervalSchedule.objects.create(every=1, period="minutes")
    other = PeriodicTask.objects.create(name="other", task="scheduling.dispatch_due", interval=every)
    assert editor.get(url("shop_schedule", other.pk)).status_code == 404
    assert editor.post(url("shop_schedule", other.pk), {"delete": "1"}).status_code == 404
    page = text(editor.get(url("shop_schedules")))
    assert ("there is no shop “s2”" in page, "scheduling.dispatch_due" in page) == (True, False)


def test_schedule_that_was_written_past_the_form_stops_no_page(editor, market):
    editor.post(url("shop_schedule_add"), {**SCHEDULE, "flow": market.sync.pk})
    row = PeriodicTask.objects.get(task="rpa_tasks.publish_for_shops")
    wrong = {"platform": "pdd", "task_type": "sync_order", "shops": 5, "spread_seconds": "ten", "due_seconds": 1e300}
    PeriodicTask.objects.filter(pk=row.pk).update(kwargs=json.dumps(wrong))
    assert "spread_seconds" in text(editor.get(url("shop_schedules")))
    assert editor.get(url("shop_schedule", row.pk)).status_code == 200
    PeriodicTask.objects.filter(pk=row.pk).update(kwargs=json.dumps(wrong | {"platform": "p\0", "task_type": "\ud800"}))
    assert "U+0000" in text(editor.get(url("shop_schedules")))
    assert editor.get(url("shop_schedule", row.pk)).status_code == 200
    odd = {"shops": ["s1", "\ud800"], "payload": {"a": "\ud800", "b": float("nan")}, "\ud800": 1, "spread_seconds": 60}
    PeriodicTask.objects.filter(pk=row.pk).update(kwargs=json.dumps(wrong | odd))
    assert "U+D800" in text(editor.get(url("shop_schedules")))
    form = editor.get(url("shop_schedule", row.pk)).context["form"]
    assert (form.initial["shops"], form.initial["spread"]) == (["s1", "⟨U+D800⟩"], 1)
    assert form.initial["flow"] == market.sync
    assert "\\ud800" in form["payload"].value()


def test_schedule_keeps_spans_that_are_no_whole_minutes(editor, market):
    """30 seconds of spread became none, so that all shops started at once."""
    editor.post(url("shop_schedule_add"), {**SCHEDULE, "flow": market.sync.pk})
    row = PeriodicTask.objects.get(task="rpa_tasks.publish_for_shops")
    arguments = json.loads(row.kwargs) | {"spread_seconds": 30, "due_seconds": 100}
    PeriodicTask.objects.filter(pk=row.pk).update(kwargs=json.dumps(arguments))
    form = editor.get(url("shop_schedule", row.pk)).context["form"]
    shown = {name: form[name].value() for name in ("spread", "due")}
    answer = editor.post(url("shop_schedule", row.pk), {**SCHEDULE, **shown, "flow": market.sync.pk, "name": "new"})
    assert answer.status_code == 302
    row.refresh_from_db()
    assert (row.name, json.loads(row.kwargs)) == ("new", arguments)


def test_node_without_report_is_marked_and_deletable(editor, as_member, market):
    for name, minutes in (("here", 0), ("gone", 5)):
        seen = now() - timedelta(minutes=minutes)
        ExecutionNode.objects.create(name=name, seen_at=seen, started_at=seen, slots=5, queues=["high"])
    assert "no report" not in text(editor.get(url("executionnode_change", "here")))
    assert "no report" in text(editor.get(url("executionnode_change", "gone")))
    admin = as_member("admin")
    assert admin.post(url("executionnode_delete", "here"), {"post": "yes"}).status_code == 403
    admin.post(url("executionnode_delete", "gone"), {"post": "yes"})
    assert [node.name for node in ExecutionNode.objects.all()] == ["here"]


def test_node_page_drains_releases_and_resumes(as_member, operator, viewer, market):
    ExecutionNode.objects.create(name="n1", seen_at=now(), started_at=now(), slots=5, queues=["high"])
    market.running("s2")
    Lane.objects.update(home="n1")
    market.waiting("s1", dedupe_key="a")
    page = url("executionnode_change", "n1")
    assert url("executionnode_drain", "n1") not in text(viewer.get(page))
    assert url("executionnode_drain", "n1") in text(operator.get(page))
    assert "Shops whose browser profile is on this node: 2" in text(operator.get(url("executionnode_drain", "n1")))
    assert "starts nothing new" in messages_of(operator.post(url("executionnode_drain", "n1")))
    shown = text(operator.get(page))
    for words in ("drained", "Drained by operator", "Still running: 1 jobs, 0 take-overs", "login only here", "2 / 1"):
        assert words in shown, words
    assert "n1" in text(operator.get(url("executionnode_changelist")))
    assert "1 shops are free to move; 1 run" in messages_of(operator.post(url("executionnode_release_shops", "n1")))
    Job.objects.filter(state="running").update(state="succeeded", lease_until=None, settled_at=now())
    assert "it may be stopped" in text(operator.get(page))
    logged = LogEntry.objects.order_by("pk").values_list("change_message", flat=True)
    assert list(logged) == ["Shops released: 1."]
    audited = AuditEntry.objects.filter(kind="rpa_tasks.executionnode").order_by("pk").values_list("action", "actor")
    assert list(audited)[:2] == [("paused", "operator"), ("acted", "operator")]

    ExecutionNode.objects.update(seen_at=now() - timedelta(days=1))
    admin = as_member("admin")
    assert "If it comes back after this" in messages_of(admin.get(url("executionnode_delete", "n1")))
    assert "takes jobs again" in messages_of(operator.post(url("executionnode_resume", "n1")))
    assert ExecutionNode.objects.get().draining_at is None


def test_reported_login_counts_or_is_checked_by_the_flow_of_the_platform(operator, market):
    page = url("shop_confirm_login", market.s1.pk)
    needed = {"login_state": LoginState.NEEDED, "login_lost_at": now()}
    Shop.objects.filter(pk=market.s1.pk).update(**needed)
    shown = text(operator.get(page))
    assert ("your report counts" in shown, "pdd-s1" in shown) == (True, True)
    assert "continue" in messages_of(operator.post(page))
    assert "No login was needed" in messages_of(operator.post(page))
    market.s1.refresh_from_db()
    assert (market.s1.login_state, market.s1.login_lost_at) == ("ok", None)

    Shop.objects.filter(pk=market.s1.pk).update(**needed)
    Platform.objects.update(check_task_type="sync_order")
    assert "The flow sync_order checks the login first" in text(operator.get(page))
    assert "is being checked" in messages_of(operator.post(page))
    assert "Login is being checked" in row_of(operator, market.s1)
    assert "a check of it is open" in messages_of(operator.post(page))
    check = Job.objects.get()
    assert "Shop needs a login" not in text(operator.get(url("job_change", check.pk)))
    Job.objects.update(state="cancelled", lease_until=None, settled_at=now())
    Lane.objects.filter(shop=market.s1).update(check_id=None, check_reason="exit_1")
    assert "check: Ended with exit code 1" in row_of(operator, market.s1)


def test_platform_form_takes_only_a_check_of_its_own_flows(editor, market):
    form = {"name": "", "backlog_limit": "5", "breaker_threshold": "3", "waits_for_home": "on"}
    form["row_version"] = shown_version(editor, "platform", market.pdd)
    page = url("platform_change", market.pdd.pk)
    assert "pdd has no task type" in text(editor.post(page, {**form, "check_task_type": "login"}))
    assert editor.post(page, {**form, "check_task_type": "sync_order"}).status_code == 302
    assert Platform.objects.get(key="pdd").check_task_type == "sync_order"


def test_run_selected_publishes_round(as_member, market, sent_wakeups):
    superuser = as_member("admin")
    order = {**SCHEDULE, "flow": market.sync.pk, "spread": "0", "payload": '{"day": 1}'}
    superuser.post(url("shop_schedule_add"), order)
    row = PeriodicTask.objects.get(task="rpa_tasks.publish_for_shops")
    changelist = reverse("admin:django_celery_beat_periodictask_changelist")

    page = superuser.post(changelist, {"action": "run_tasks", "_selected_action": [row.pk]}, follow=True)

    assert "1 schedule was run." in text(page)
    assert Job.objects.filter(payload={"day": 1}).count() == 2
    PeriodicTask.objects.update(kwargs='{"platform": "pdd"}')
    page = superuser.post(changelist, {"action": "run_tasks", "_selected_action": [row.pk]}, follow=True)
    assert "task_type: is missing" in text(page)
