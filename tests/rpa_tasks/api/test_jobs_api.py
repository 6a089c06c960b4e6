"""Publishing jobs over HTTP, following them, and calling them off."""

import zlib
from datetime import UTC, datetime, timedelta, timezone
from uuid import UUID

import psycopg
import pytest

from rpa_tasks.models import Evidence, Flow, Job, Run, Shop
from rpa_tasks.worker.runner import UNPACKED_LIMIT
from scheduling.ids import new_id
from tests.scheduling.api.serving import database_url
from tests.support.tables import each_row

pytestmark = pytest.mark.django_db(transaction=True)

BRIEF = {
    "task_id", "delivery_key", "retry_of", "retried_as", "platform", "shop_id", "task_type", "state", "reason",
    "priority", "dedupe_key", "requests", "source", "touch", "due_at", "planned_at", "created_at",
    "deadline", "settled_at", "attempt", "failures", "node", "progress", "progress_message", "cancel_requested_at",
}  # fmt: skip
LATER = 3_600


def job_request(shop_id="s1", **changes):
    return {"platform": "pdd", "shop_id": shop_id, "task_type": "sync_order"} | changes


def publish(api, shop_id="s1", **changes):
    answer = api("POST", "/rpa/jobs", job_request(shop_id, **changes))
    assert answer.status_code in (200, 202), answer.text
    return answer.json()["task_id"]


def fields_of(answer):
    assert answer.status_code == 422, answer.text
    assert answer.headers["content-type"] == "application/problem+json"
    return [each["field"] for each in answer.json()["errors"]]


def test_publish_job_stores_request(api):
    answer = api("POST", "/rpa/jobs", job_request(payload={"since": "2026-03-01"}, priority="high", delay_seconds=90.5))

    assert answer.status_code == 202
    row = Job.objects.get()
    assert answer.json() == {
        "task_id": str(row.task_id), "duplicate": False, "state": "scheduled", "because": None, "window_ends_at": None,
    }  # fmt: skip
    assert (row.payload, row.priority, row.source) == ({"since": "2026-03-01"}, 0, "api:shop")
    assert timedelta(seconds=90) < row.due_at - row.created_at < timedelta(seconds=91)


def test_publish_job_merges_into_waiting_job(api):
    first = publish(api, delay_seconds=LATER, payload={"n": 1})
    answer = api("POST", "/rpa/jobs", job_request(delay_seconds=LATER, payload={"n": 2}, priority="high"))
    assert answer.status_code == 200
    assert answer.json() == {
        "task_id": first, "duplicate": True, "state": "scheduled", "because": "waiting", "window_ends_at": None,
    }  # fmt: skip
    assert publish(api, delay_seconds=LATER, dedupe_key="other") != first
    told = api.get(f"/rpa/jobs/{first}").json()
    assert (told["payload"], told["priority"], told["requests"]) == ({"n": 2}, "high", 2)


def test_publish_waits_briefly_for_a_locked_job(api):
    publish(api, delay_seconds=LATER)
    with psycopg.connect(database_url()) as other:
        other.execute("SELECT FROM rpa_tasks_job FOR NO KEY UPDATE")
        assert api("POST", "/rpa/jobs", job_request(delay_seconds=LATER)).status_code == 503
    assert Job.objects.get().requests == 1


def test_publish_within_window_names_its_job_and_end(api, market):
    Flow.objects.update(dedupe_window=timedelta(days=1))
    first = publish(api)
    Job.objects.update(state="succeeded", lease_until=None)
    answer = api("POST", "/rpa/jobs", job_request())

    assert answer.status_code == 200
    told = answer.json()
    ends_at = datetime.fromisoformat(told.pop("window_ends_at"))
    assert told == {"task_id": first, "duplicate": True, "state": "succeeded", "because": "window"}
    assert timedelta(hours=23) < ends_at - datetime.now(UTC) < timedelta(days=1)


def test_publish_stores_earliest_start_and_due_date(api):
    six = (datetime.now(UTC) + timedelta(days=1)).replace(microsecond=0)
    task = publish(
        api, not_before="2026-01-01T00:00:00Z", due_at=six.astimezone(timezone(timedelta(hours=8))).isoformat()
    )
    told = api.get(f"/rpa/jobs/{task}").json()
    assert datetime.fromisoformat(told["deadline"]) == six
    for impossible in ("2026-01-01T00:00:00Z", "9999-12-31T23:59:59-12:00"):
        assert fields_of(api("POST", "/rpa/jobs", job_request(due_at=impossible))) == ["due_at"]
    assert fields_of(api("POST", "/rpa/jobs", job_request(due_at="2999-01-01T00:00:00"))) == ["due_at"]  # no zone


def test_publish_batch_answers_for_each_job(api, market):
    Shop.objects.filter(shop_id="s2").update(backlog_limit=1)
    publish(api, "s2", dedupe_key="other", delay_seconds=LATER)
    wishes = [
        job_request(), job_request(payload={"n": 2}), job_request("s9"), job_request("s2"),
        job_request(payload={"shop_id": "x", "lease_no": 1}),
    ]  # fmt: skip
    answer = api("POST", "/rpa/jobs/batch", {"jobs": wishes})

    assert answer.status_code == 200, answer.text
    results = answer.json()["results"]
    assert [each["status"] for each in results] == [202, 200, 422, 429, 422]
    assert results[1]["task_id"] == results[0]["task_id"]
    assert results[1]["because"] == "waiting"
    assert [error["field"] for error in results[2]["errors"]] == ["shop_id"]
    assert [error["field"] for error in results[4]["errors"]] == ["payload.shop_id", "payload.lease_no"]
    assert Job.objects.count() == 2


@each_row(
    "jobs, field",
    [([], "jobs"), ([{"platform": "pdd"}], "jobs.0.shop_id"), ("all", "jobs"), ([job_request()] * 501, "jobs")],
)
def test_invalid_batch_stores_nothing(api, jobs, field):
    assert field in fields_of(api("POST", "/rpa/jobs/batch", {"jobs": jobs}))
    assert not Job.objects.exists()


def test_publish_batch_takes_500_jobs(api, market):
    market.s1.backlog_limit = 1_000
    market.s1.save()
    wishes = [job_request(dedupe_key=str(number)) for number in range(500)]

    results = api("POST", "/rpa/jobs/batch", {"jobs": wishes}).json()["results"]
    again = api("POST", "/rpa/jobs/batch", {"jobs": wishes}).json()["results"]

    assert {each["status"] for each in results} == {202}
    assert {each["status"] for each in again} == {200}
    assert [each["task_id"] for each in again] == [each["task_id"] for each in results]
    assert Job.objects.count() == 500


@each_row(
    "changes, field",
    [
        ({"platform": "temu"}, "platform"),
        ({"shop_id": "s9"}, "shop_id"),
        ({"task_type": "bake"}, "task_type"),
        ({"platform": ""}, "platform"),
        ({"shop_id": 7}, "shop_id"),
        ({"shop_id": None}, "shop_id"),
        ({"priority": "urgent"}, "priority"),
        ({"priority": 0}, "priority"),
        ({"delay_seconds": -1}, "delay_seconds"),
        ({"delay_seconds": 1e9}, "delay_seconds"),
        ({"delay_seconds": True}, "delay_seconds"),
        ({"delay_seconds": "60"}, "delay_seconds"),
        ({"payload": []}, "payload"),
        ({"payload": {"x": "y" * 70_000}}, "payload"),
        ({"dedupe_key": "k" * 201}, "dedupe_key"),
        ({"dedupe_key": "a\0b"}, "dedupe_key"),
        ({"dedupe_key": "@payload:1"}, "dedupe_key"),
        ({"payload": {"a": "\0"}}, "payload.a"),
        ({"payload": {"a": {"b": "\ud800"}}}, "payload.a.b"),
        ({"colour": "red"}, "colour"),
    ],
)
def test_publish_job_with_invalid_member_names_field(api, changes, field):
    assert fields_of(api("POST", "/rpa/jobs", job_request() | changes)) == [field]
    assert not Job.objects.exists()


def test_publish_job_for_retired_shop_or_flow_is_refused(api, market):
    market.s1.retired_at = market.sync.retired_at = datetime.now(UTC)
    market.s1.save()
    assert fields_of(api("POST", "/rpa/jobs", job_request())) == ["shop_id"]
    market.sync.save()
    assert fields_of(api("POST", "/rpa/jobs", job_request("s2"))) == ["task_type"]


def test_publish_job_with_invalid_payload_names_paths(api, market):
    market.sync.payload_schema = {
        "type": "object",
        "required": ["reply"],
        "properties": {"x": {"properties": {"y": {"type": "integer"}}}, "list": {"items": {"maxLength": 3}}},
    }
    market.sync.save()
    payload = {"reply": "", "x": {"y": "no"}, "list": ["ok", "z" * 9_000]}
    answer = api("POST", "/rpa/jobs", job_request(payload=payload))
    assert sorted(fields_of(answer)) == ["payload.list.1", "payload.x.y"]
    assert len(answer.text) < 2_000
    assert fields_of(api("POST", "/rpa/jobs", job_request())) == ["payload"]
    publish(api, payload={"reply": "您好", "x": {"y": 3}})


def test_publish_job_above_backlog_returns_429_with_retry_after(api, market):
    market.s1.backlog_limit = 1
    market.s1.save()
    first = publish(api, delay_seconds=LATER)
    answer = api("POST", "/rpa/jobs", job_request(delay_seconds=LATER, dedupe_key="k"))
    assert (answer.status_code, answer.headers["content-type"]) == (429, "application/problem+json")
    assert int(answer.headers["Retry-After"]) >= 60
    assert "pdd/s1" in answer.json()["detail"]
    assert publish(api, delay_seconds=LATER) == first  # merging adds no waiting job
    publish(api, "s2", delay_seconds=LATER)


@pytest.fixture
def jobs(api, market):
    """Task ids by what they are."""
    market.flow("batch_reply")
    return {
        "s1 sync": publish(api, delay_seconds=LATER),
        "s2 sync": publish(api, "s2", delay_seconds=LATER),
        "s1 reply": publish(api, task_type="batch_reply", delay_seconds=LATER),
    }


def test_list_jobs_filters_by_members(api, jobs):
    Job.objects.filter(pk=jobs["s2 sync"]).update(state="succeeded")
    names = {task_id: name for name, task_id in jobs.items()}

    def found(**filters):
        answer = api.get("/rpa/jobs", **filters).json()
        assert all(item.keys() == BRIEF for item in answer["items"])
        return [names[item["task_id"]] for item in answer["items"]]

    assert found() == found(platform="pdd") == ["s1 reply", "s2 sync", "s1 sync"]
    assert found(shop="s1") == found(shop="s1", platform="pdd") == ["s1 reply", "s1 sync"]
    assert found(task_type="sync_order") == ["s2 sync", "s1 sync"]
    assert found(state="succeeded") == ["s2 sync"]
    assert found(shop="s1", task_type="sync_order", state="scheduled") == ["s1 sync"]
    assert found(shop="s9") == found(platform="temu") == found(task_type="bake") == []
    page = api.get("/rpa/jobs", limit=2).json()
    assert page["items"] == api.get("/rpa/jobs").json()["items"][:2]
    last = api.get("/rpa/jobs", limit=2, cursor=page["next"]).json()
    assert ([names[item["task_id"]] for item in last["items"]], last["next"]) == (["s1 sync"], None)


@each_row(
    "query, field",
    [({"state": "lost"}, "state"), ({"limit": 0}, "limit"), ({"limit": 201}, "limit"), ({"cursor": "x"}, "cursor")],
)
def test_list_jobs_names_invalid_field(api, query, field):
    assert fields_of(api.get("/rpa/jobs", **query)) == [field]


@pytest.fixture
def failed(api):
    def failed():
        row = Job.objects.get(pk=publish(api, payload={"since": 1}, delay_seconds=LATER))
        run = Run.objects.create(
            job=row, number=1, lease_no=4, node="n1", started_at=datetime(2026, 3, 1, tzinfo=UTC),
            pool_wait=timedelta(milliseconds=250), outcome="business", reason="exit_65", exit_code=65, detail="no",
        )  # fmt: skip
        Evidence.objects.create(run=run, kind="screenshot", content=b"\x89PNG\r\n\x1a\n...")
        Evidence.objects.create(run=run, kind="html", content=zlib.compress("<script>您好</script>".encode()))
        Job.objects.filter(pk=row.pk).update(state="failed", reason="exit_65", lease_until=None)
        return row

    return failed


def test_get_job_returns_runs_and_evidence(api, failed):
    row = failed()
    told = api.get(f"/rpa/jobs/{row.task_id}").json()

    assert told.keys() == BRIEF | {"payload", "result", "runs"}
    assert (told["platform"], told["shop_id"], told["task_type"]) == ("pdd", "s1", "sync_order")
    assert (told["state"], told["reason"], told["payload"], told["result"]) == ("failed", "exit_65", {"since": 1}, None)
    (run,) = told["runs"]
    assert (run["outcome"], run["exit_code"], run["lease_no"], run["pool_wait_seconds"]) == ("business", 65, 4, 0.25)
    assert [each["kind"] for each in run["evidence"]] == ["screenshot", "html"]


def test_evidence_is_served_as_attachment(api, failed):
    (run,) = api.get(f"/rpa/jobs/{failed().task_id}").json()["runs"]
    picture, page = (api.get(each["url"].removeprefix("/api/v1")) for each in run["evidence"])
    assert (picture.headers["content-type"], picture.content) == ("image/png", b"\x89PNG\r\n\x1a\n...")
    assert (page.headers["content-type"], page.text) == ("text/plain; charset=utf-8", "<script>您好</script>")
    for each in (picture, page):
        assert each.headers["content-disposition"].startswith("attachment;")
        assert each.headers["x-content-type-options"] == "nosniff"
        assert each.headers["cache-control"] == "no-store", "no copy outlives an erasure"


@each_row(
    "kept, given",
    [
        (b"no zlib", b"no zlib"),
        (zlib.compress(b"0" * (UNPACKED_LIMIT + 1)), b"0" * UNPACKED_LIMIT),
        (zlib.compress(b"whole")[:-4], b"whole"),
    ],
)
def test_evidence_with_damaged_or_large_content_is_limited(api, failed, kept, given):
    """A node may write what it likes, and a few bytes of zlib may hold gigabytes."""
    (run,) = api.get(f"/rpa/jobs/{failed().task_id}").json()["runs"]
    Evidence.objects.filter(kind=Evidence.Kind.HTML).update(content=kept)
    page = api.get(run["evidence"][1]["url"].removeprefix("/api/v1"))
    assert (page.status_code, page.content == given) == (200, True)


def test_evidence_of_other_job_returns_404(api, failed):
    row = failed()
    (run,) = api.get(f"/rpa/jobs/{row.task_id}").json()["runs"]
    number = run["evidence"][0]["url"].rpartition("/")[2]
    assert api.get(f"/rpa/jobs/{new_id()}/evidence/{number}").status_code == 404
    for wrong in ("0", "-1", str(2**80), "99999999"):
        assert api.get(f"/rpa/jobs/{row.task_id}/evidence/{wrong}").status_code == 404, wrong


def test_cancel_ends_a_waiting_job_and_asks_a_running_one_to_stop(api):
    task_id = publish(api, delay_seconds=LATER)
    told = api("POST", f"/rpa/jobs/{task_id}/cancel").json()
    assert (told["state"], told["reason"]) == ("cancelled", "by:api:shop")
    assert api("POST", f"/rpa/jobs/{task_id}/cancel").status_code == 409

    running = publish(api, delay_seconds=LATER)
    Job.objects.filter(pk=running).update(state="running", lease_until=datetime(2099, 1, 1, tzinfo=UTC))
    told = api("POST", f"/rpa/jobs/{running}/cancel").json()
    assert told["state"] == "running"
    assert told["cancel_requested_at"]


@each_row("method, path", [("GET", "/rpa/jobs/{}"), ("POST", "/rpa/jobs/{}/cancel")])
def test_unknown_job_returns_404(api, method, path):
    assert api(method, path.format(UUID(int=7))).status_code == 404
    assert api(method, path.format("no-uuid")).status_code == 422


def test_retried_job_links_origin_and_retry(api, failed, market):
    old = failed()
    again = Job.objects.create(
        shop=market.s1, flow=market.sync, retry_of=old.task_id, root_id=old.root_id, due_at=old.due_at,
        planned_at=old.due_at, fresh=False,
    )  # fmt: skip
    assert api.get(f"/rpa/jobs/{old.task_id}").json()["retried_as"] == str(again.task_id)
    told = api.get(f"/rpa/jobs/{again.task_id}").json()
    assert (told["retry_of"], told["delivery_key"]) == (str(old.task_id), str(old.root_id))
