"""System checks refuse contradictory settings."""

from datetime import timedelta

from celery import Celery, _state, current_app
from django.core.checks import run_checks
from django.test import override_settings

from scheduling import checks
from scheduling.delivery.outgoing import BATCH_DEADLINE, LEASE
from scheduling.ledger.touches import WAKEUP_LEASE
from scheduling.models.node import MAX_TIMEOUT
from tests.support.tables import each_row

SECOND = timedelta(seconds=1)


def found():
    """Ids of all errors of this kind, as `manage.py check` collects them."""
    return [str(each.id) for each in run_checks() if str(each.id).startswith("aftertouch.E")]


@each_row(
    "name, most",
    [("BATCH_DEADLINE", LEASE - MAX_TIMEOUT - 3 * SECOND), ("MAX_TIMEOUT", LEASE - BATCH_DEADLINE - 3 * SECOND)],
)
def test_check_batch_or_timeout_beyond_lease_fails(monkeypatch, name, most):
    monkeypatch.setattr(checks, name, most)
    assert found() == []
    monkeypatch.setattr(checks, name, most + SECOND)
    assert found() == ["aftertouch.E001"]


def test_check_short_visibility_timeout_fails(settings):
    needed = 2 * (settings.AFTERTOUCH_HORIZON + WAKEUP_LEASE + BATCH_DEADLINE)
    for seconds, errors in (
        (needed.total_seconds(), ["aftertouch.E002"]), (needed.total_seconds() + 1, []), (None, []),
    ):  # fmt: skip
        options = settings.CELERY_BROKER_TRANSPORT_OPTIONS | {"visibility_timeout": seconds}
        settings.CELERY_BROKER_TRANSPORT_OPTIONS = options
        assert found() == errors
    settings.CELERY_BROKER_TRANSPORT_OPTIONS = {}  # RabbitMQ has none
    assert found() == []


def test_check_horizon_beyond_visibility_timeout_fails(settings):
    seconds = settings.CELERY_BROKER_TRANSPORT_OPTIONS["visibility_timeout"]
    settings.AFTERTOUCH_HORIZON = timedelta(seconds=seconds / 2)
    assert "aftertouch.E002" in found()


@each_row(
    "registry, value",
    [
        ("CHANNELS", {"pigeon": "scheduling.channels.pigeon.Pigeon"}),
        ("CHANNELS", {"pigeon": "scheduling.channels.base.Message"}),
        ("CONFIG_SECTIONS", ["no.such.module.Section"]),
        ("INTEGRATIONS", ["scheduling.integration.no_such_name"]),
    ],
)
def test_check_unknown_registry_path_fails(registry, value):
    with override_settings(**{registry: value}):
        (error,) = checks.check_registry_paths()
    assert error.id == "aftertouch.E003"
    assert error.msg.startswith(f"{registry} names ")


def test_check_foreign_celery_app_fails():
    """What `shared_task` would then publish to: amqp on this machine."""
    ours = current_app._get_current_object()
    other = Celery("somebody", set_as_current=False)
    try:
        _state._set_current_app(other)
        assert found() == ["aftertouch.E004"]
    finally:
        _state._set_current_app(ours)
    assert found() == []


@each_row(
    "host, options, names",
    [
        ("db.example", {}, ["aftertouch.W005"]), ("db.example", {"sslmode": "disable"}, []), ("127.0.0.1", {}, []),
        ("", {}, []),
    ],
)  # fmt: skip
@each_row("alias", ["default", "replica"])
def test_deploy_check_remote_database_without_tls_decision_warns(monkeypatch, alias, host, options, names):
    monkeypatch.setitem(checks.settings.DATABASES, alias, {"HOST": host, "OPTIONS": options})
    assert [each.id for each in checks.check_database_encryption()] == names
