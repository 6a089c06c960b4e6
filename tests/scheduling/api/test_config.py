"""Clients read the configuration, publish documents, and refuse to overwrite what others published."""

import json
from datetime import timedelta
from functools import partial

import pytest
from django.db import connection

from scheduling import sql
from scheduling.api import config
from scheduling.configuration.file.apply import compute_version, export_document, plan_changes, publish_document
from scheduling.configuration.file.section import Stamp
from scheduling.configuration.file.sections import sections
from scheduling.models import AuditEntry, Node, Template
from scheduling.planning import rescheduling
from scheduling.strict_text import write_yaml
from tests.scheduling.api.serving import cloud_event
from tests.scheduling.config_file.conftest import BASE_CONFIG
from tests.support.second_connection import run_concurrently
from tests.support.tables import each_row

pytestmark = pytest.mark.django_db(transaction=True)
SECRET = "whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw"
YAML = {"Content-Type": "application/yaml"}


def publish(api, body, match="*", *, reason="new season", **params):
    """PUT a text as YAML, anything else as JSON."""
    headers = {"If-Match": match} if match else {}
    params |= {"reason": reason} if reason else {}
    if isinstance(body, str):
        return api("PUT", "/config", data=body.encode(), params=params, headers=headers | YAML)
    return api("PUT", "/config", body, params=params, headers=headers)


def fields_of(answer):
    assert answer.status_code == 422, answer.text
    return {each["field"]: each["message"] for each in answer.json()["errors"]}


def test_read_document_published_unchanged_changes_nothing(api):
    publish(
        api,
        BASE_CONFIG + f"webhooks: [{{key: crm, url: 'https://example.com/', secret: {SECRET}, events: [job.ended]}}]",
    )
    found = api.get("/config")
    assert found.headers["content-type"] == "application/json; charset=utf-8"
    assert found.json() == json.loads(json.dumps(export_document()))
    assert SECRET not in found.text
    text = api("GET", "/config", headers={"Accept": "application/yaml"})
    assert text.headers["content-type"] == "application/yaml; charset=utf-8"
    assert (text.text, text.headers["etag"]) == (write_yaml(export_document()), found.headers["etag"])
    for body in (found.json(), text.text):
        answer = publish(api, body, found.headers["etag"])
        assert answer.json()["changes"] == [], answer.text
        assert answer.headers["etag"] == found.headers["etag"]
    assert api("GET", "/config", headers={"Accept": "image/png"}).status_code == 406


def test_publication_stores_author_and_reason(api):
    answer = publish(api, BASE_CONFIG)
    assert answer.status_code == 200, answer.text
    assert answer.json() | {"version": "", "notes": []} == {
        "stored": True, "version": "", "notes": [], "impact": None, "moved": None,
        "changes": [
            {"section": section, "verb": "added", "label": label, "differences": []}
            for section, label in (
                ("channels", "log"), ("templates", "guide"), ("stages", "presale"), ("nodes", "presale-download"),
            )
        ],
    }  # fmt: skip
    entry = AuditEntry.objects.get(action="published")
    assert (entry.actor, entry.reason, len(entry.changes)) == ("api:shop", "new season", 4)
    history = Node.objects.get(key="presale-download").history.get()
    assert history.history_change_reason == "api:shop: new season"


def test_publication_without_reason_or_version_is_refused(api):
    assert fields_of(publish(api, BASE_CONFIG, reason="")).keys() == {"reason"}
    assert fields_of(publish(api, BASE_CONFIG, reason="x" * 501)).keys() == {"reason"}
    missing = publish(api, BASE_CONFIG, match="")
    assert (missing.status_code, missing.json()["title"]) == (428, "Precondition Required")
    for other in ("other", '"other"', 'W/"00000000000000000000000000000000"', f'"{"0" * 32}"'):
        assert publish(api, BASE_CONFIG, other).status_code == 412
    assert not Node.objects.exists()


def test_error_names_each_wrong_field(api):
    wrong = BASE_CONFIG.replace("delay: 15m, template: guide", "delay: soon, template: other, at: [1]")
    assert fields_of(publish(api, wrong)).keys() == {"nodes.0.delay", "nodes.0.template", "nodes.0.at"}
    assert fields_of(publish(api, wrong + "colours: []")).keys() == {"colours"}
    assert fields_of(publish(api, wrong, dry_run=True)).keys() >= {"nodes.0.delay"}
    assert fields_of(publish(api, {"version": 2})) == {"version": "must be 1"}
    assert not Template.objects.exists()


@each_row(
    "body, kind, status, words",
    [
        (b"nodes: [", "application/yaml", 400, "line 2"),
        (b"nodes: *a", "application/yaml; charset=utf-8", 400, "line 1: aliases"),
        (b"\xff", "application/yaml", 400, "must be UTF-8"),
        (b"\xff", "application/json", 400, "must be UTF-8"),
        (b'{"nodes": [], "nodes": []}', "application/json", 400, "given twice"),
        (b"[]", "application/json", 400, "object of sections"),
        (b"- a", "application/yaml", 400, "mapping of sections"),
        (b"{}", "text/csv", 415, "application/yaml"),
        (b"{}", "application/json; charset=gbk", 415, "UTF-8"),
        (b"# " + b"x" * 1_048_576, "application/yaml", 413, "1048576"),
    ],
)
def test_unreadable_document_is_refused(api, body, kind, status, words):
    headers = {"Content-Type": kind, "If-Match": "*"}
    answer = api("PUT", "/config", data=body, params={"reason": "r"}, headers=headers)
    assert answer.status_code == status, answer.text
    assert words in answer.json()["detail"]
    assert not AuditEntry.objects.filter(action="published").exists()


def test_dry_run_returns_difference_and_impact_and_stores_nothing(api):
    publish(api, BASE_CONFIG)
    assert api.event(cloud_event()).status_code == 202
    before = compute_version()
    answer = publish(api, BASE_CONFIG.replace("15m", "20m"), match="", reason="", dry_run=True)
    assert answer.status_code == 200, answer.text
    found = answer.json()
    assert not found["stored"]
    assert found["changes"] == [
        {
            "section": "nodes", "verb": "changed", "label": "presale-download",
            "differences": [{"path": "delay", "before": "15m", "after": "20m"}],
        }
    ]  # fmt: skip
    moved = {"touches": 1, "overdue": 0, "left": 0, "broken": False}
    assert found["impact"] == {
        "nodes": [
            {"node": "presale-download", "verb": "changed", "waiting": 1, "moved": moved, "condition": None}
        ],
        "rules": [],
    }  # fmt: skip
    assert compute_version() == before == found["version"]
    assert publish(api, BASE_CONFIG, f'"{"0" * 32}"', dry_run=True).status_code == 412


@pytest.mark.parametrize("slow", ["rules", "one statement"])
def test_impact_has_one_time_limit(api, monkeypatch, slow):
    document = {"harassment_rules": [{"kind": "cap", "limit": place + 1, "window": "24h"} for place in range(50)]}
    planned = plan_changes(document)
    pause = 0.1 if slow == "rules" else 30

    def count_slowly(*_):
        return len(sql.rows("SELECT pg_sleep(%(pause)s)", {"pause": pause}))

    monkeypatch.setattr(config, "TIME_LIMIT", timedelta(seconds=1))
    monkeypatch.setattr(rescheduling, "count_limited_touches", count_slowly)
    assert config._measure_impact(planned) is None
    monkeypatch.undo()
    assert config._measure_impact(planned) == {"nodes": [], "rules": []}


def test_repeated_publication_goes_on_moving(api):
    publish(api, BASE_CONFIG)
    api.event(cloud_event())
    read = api.get("/config").headers["etag"]
    later = BASE_CONFIG.replace("15m", "20m")
    assert publish(api, later, read).status_code == 200  # as if the time limit had left all touches
    again = publish(api, later, read, move_waiting=True)
    assert again.status_code == 200, again.text
    assert again.json()["changes"] == []
    assert again.json()["moved"] == {"touches": 1, "overdue": 0, "left": 0, "broken": False}
    touch = api.get("/touches").json()["items"][0]
    assert touch["due_at"] == touch["planned_at"]
    assert publish(api, later, read).status_code == 412
    assert publish(api, BASE_CONFIG, read, move_waiting=True).status_code == 412
    assert AuditEntry.objects.filter(action="published").count() == 2


def test_version_follows_each_edit_of_an_operator_and_secrets(api):
    publish(
        api,
        BASE_CONFIG + f"webhooks: [{{key: crm, url: 'https://example.com/', secret: {SECRET}, events: [job.ended]}}]",
    )
    read = api.get("/config").headers["etag"]
    node = Node.objects.get()
    node.delay = timedelta(minutes=5)
    node.save()
    assert publish(api, BASE_CONFIG, read).status_code == 412
    read = api.get("/config").headers["etag"]
    other = SECRET.replace("Mf", "Ng")
    with_other = f"webhooks: [{{key: crm, url: 'https://example.com/', secret: {other}, events: [job.ended]}}]"
    assert publish(api, with_other, read).status_code == 200
    assert publish(api, BASE_CONFIG, read).status_code == 412
    Node.objects.filter(pk=node.pk).update(delay=timedelta(minutes=5))  # the same content is the same version
    assert compute_version() == api.get("/config").headers["etag"].strip('"')


def test_version_of_a_publication_leaves_out_edits_of_other_sections(api, second_connection):
    """A client that continued with it took back an edit that it had never read."""
    publish(api, BASE_CONFIG)
    read, edit = compute_version(), partial(Node.objects.update, delay=timedelta(minutes=5))
    _planned, version = publish_document(
        {"templates": export_document()["templates"]}, Stamp("test"), read, lambda _planned: second_connection(edit)
    )
    assert version == read != compute_version()


def test_export_is_of_one_moment(api, second_connection, monkeypatch):
    """Otherwise a node refers to a template that the file does not have, or the file retires it."""
    publish(api, BASE_CONFIG)

    def export_before_an_edit(*args, **options):
        exported = export(*args, **options)
        if not Template.objects.filter(key="other").exists():
            second_connection(add_template_to_node)
        return exported

    def add_template_to_node():
        Node.objects.update(template=Template.objects.create(key="other", content_type="guide"))

    templates = sections()["templates"]
    export = templates.export
    monkeypatch.setattr(templates, "export", export_before_an_edit)
    exported = export_document()
    assert Node.objects.get().template.key == "other"
    assert plan_changes(exported).of("nodes"), "the file has the node as it was"
    assert exported["nodes"][0]["template"] == "guide"


SHARED = {
    "rpa.configure": "platforms: [{key: pdd, name: 拼多多}]",
    "rpa.commands": "flows: [{platform: pdd, task_type: sync, command: [sync, '{param}'], idempotent: true}]",
    "webhooks": f"webhooks: [{{key: crm, url: 'https://example.com/', secret: {SECRET}, events: [job.ended]}}]",
}


@pytest.mark.parametrize("scope", SHARED)
def test_change_of_section_needs_its_scope_too(api, key_for, scope):
    others = {"config.read", "config.write", *SHARED} - {scope}
    if scope != "rpa.configure":
        assert publish(api, SHARED["rpa.configure"]).status_code == 200
    writer = key_for(*others)
    for params in ({}, {"dry_run": True}):
        refused = publish(writer, BASE_CONFIG + SHARED[scope], **params)
        assert (refused.status_code, scope in refused.json()["detail"]) == (403, True), refused.text
    assert not Node.objects.exists()
    assert publish(key_for(*others, scope), BASE_CONFIG + SHARED[scope]).status_code == 200
    unchanged = writer.get("/config").json()
    assert SHARED[scope].partition(":")[0] in unchanged
    assert publish(writer, unchanged | {"stages": [{"key": "presale", "name": "先"}]}).status_code == 200


def test_two_clients_with_one_version_publish_once(api):
    """In the same section, and in different ones."""
    publish(api, BASE_CONFIG)
    for place in range(6):
        found = api.get("/config")
        read, document = found.headers["etag"], found.json()
        node = {"nodes": [document["nodes"][0] | {"delay": f"{document['nodes'][0]['delay'][:-1]}1m"}]}
        channel = {"channels": [document["channels"][0] | {"name": f"name {place}"}]}
        wanted = [node, channel if place % 2 else node]
        answers = run_concurrently(2, lambda number: publish(api, wanted[number], read))  # noqa: B023
        assert sorted(each.status_code for each in answers) == [200, 412]
    assert AuditEntry.objects.filter(action="published").count() == 7


def test_unreadable_secret_is_a_conflict(api):
    publish(api, BASE_CONFIG)
    with connection.cursor() as cursor:
        cursor.execute("UPDATE scheduling_channelconfig SET config = 'of another key'")
    retired = "channels: []\nnodes: []"
    answers = [api.get("/config"), publish(api, BASE_CONFIG, dry_run=True)]
    answers += [
        publish(api, body, move_waiting=repeats) for body in (BASE_CONFIG, retired) for repeats in (False, True)
    ]
    for answer in answers:
        assert (answer.status_code, "channel “log”" in answer.json()["detail"]) == (409, True), answer.text
    with connection.cursor() as cursor:
        cursor.execute("SELECT config, retired_at FROM scheduling_channelconfig")
        assert cursor.fetchall() == [("of another key", None)]
    assert AuditEntry.objects.filter(action="published").count() == 1
