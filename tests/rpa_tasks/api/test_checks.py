"""What the system checks find before a job does."""

import pytest
from django.core.checks import run_checks
from django.db import connection
from django.utils.timezone import now

from rpa_tasks import checks, isolation
from rpa_tasks.browsers import chromium
from rpa_tasks.models import Flow
from tests.support.tables import each_row

pytestmark = pytest.mark.django_db


def found(*databases):
    ours = [each for each in run_checks(databases=databases or None) if (each.id or "").startswith("rpa_tasks.")]
    return [(each.id, each.msg) for each in ours]


def test_check_warns_of_missing_flow_program(market):
    market.flow("retired", command=["nope"], retired_at=now())
    assert found("default") == []
    Flow.objects.filter(pk=market.sync.pk).update(command=["/nowhere/rpa-cli", "{param}"])
    ((id, message),) = found("default")
    assert id == "rpa_tasks.W001"
    assert "pdd_sync_order" in message
    assert "/nowhere/rpa-cli" in message


def test_check_searches_the_program_in_the_folder_of_its_flow(market, tmp_path):
    tool = tmp_path / "tool"
    Flow.objects.update(command=["./tool", "{param}"], cwd=str(tmp_path))
    assert [id for id, _ in found("default")] == ["rpa_tasks.W001"]
    tool.touch(0o755)
    assert found("default") == []


def test_check_without_database_runs_no_query(market, django_assert_num_queries):
    Flow.objects.update(command=["nope"])
    with django_assert_num_queries(0):
        assert found() == []


def test_check_before_first_migration_and_during_upgrade_reports_nothing(market, monkeypatch):
    Flow.objects.update(command=["nope"])
    with monkeypatch.context() as first:
        first.setattr(connection.introspection, "table_names", lambda *_: ["auth_user"])
        assert found("default") == []
    monkeypatch.setattr(connection.introspection, "get_table_description", lambda *_: [])
    assert found("default") == []


@each_row(
    "uid, isolated, namespaces, expected",
    [
        (0, False, True, ["rpa_tasks.W006"]), (0, True, True, []), (1000, False, True, []),
        (0, True, False, ["rpa_tasks.W006"]), (1000, True, False, ["rpa_tasks.W006"]),
    ],
)  # fmt: skip
def test_deploy_check_warns_of_browser_without_sandbox(settings, monkeypatch, uid, isolated, namespaces, expected):
    settings.AFTERTOUCH_ROLE = "execution"
    settings.RPA_CHROMIUM_PATH = "/bin/sh"
    monkeypatch.setattr("os.geteuid", lambda: uid)
    monkeypatch.setattr(isolation, "is_isolated", lambda: isolated)
    monkeypatch.setattr(chromium, "may_use_namespaces", lambda: namespaces)
    assert [each.id for each in checks.check_browser_sandbox()] == expected

    settings.AFTERTOUCH_ROLE = "web"
    assert checks.check_browser_sandbox() == []
