"""A setting that does not fit stops the start and is named."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from config.environment import ROLES, ROOT, Environment, read_query
from config.settings.connections import build_database
from tests.support.refused_settings import refusal_of
from tests.support.tables import each_row


def test_invalid_setting_stops_start_before_anything_is_made(tmp_path: Path) -> None:
    state_dir = tmp_path / "state"
    refused = subprocess.run(
        [sys.executable, "-m", "config.local", "run"],
        cwd=ROOT, env={**os.environ, "AFTERTOUCH_STATE_DIR": str(state_dir), "AFTERTOUCH_PORT": "eighty"}, text=True,
        capture_output=True, timeout=180, check=False,
    )  # fmt: skip
    assert refused.returncode == 1
    assert "AFTERTOUCH_PORT" in refused.stderr
    assert "Traceback" not in refused.stderr
    assert not state_dir.exists()


OIDC = {
    "AFTERTOUCH_OIDC_ISSUER": "https://id.example.com", "AFTERTOUCH_OIDC_CLIENT_ID": "a",
    "AFTERTOUCH_OIDC_CLIENT_SECRET": "b",
}  # fmt: skip


@each_row(
    "name, value, others, words",
    [
        ("AFTERTOUCH_PORT", "70000", {}, ""),
        ("AFTERTOUCH_TIME_SCALE", "0", {}, ""),
        ("AFTERTOUCH_WORKER_CONCURRENCY", "-1", {}, ""),
        ("DJANGO_LOG_LEVEL", "LOUD", {}, ""),
        ("AFTERTOUCH_HTTP_PROXY", "http://u:s3cret@proxy", {}, ""),
        ("AFTERTOUCH_RPA_ISOLATION", "jail", {}, ""),
        ("AFTERTOUCH_RPA_PATHS", "opt/flows", {}, "must start with /"),
        ("AFTERTOUCH_ROLE", "king", {}, ""),
        ("AFTERTOUCH_TIME_ZONE", "Mars", {}, "must be a name of the IANA"),
        ("AFTERTOUCH_BASE_URL", "https://shop.example/aftertouch", {}, "must not have a path"),
        ("AFTERTOUCH_BASE_URL", "https://shop.example/?a", {}, "must not have a path"),
        ("AFTERTOUCH_BASE_URL", "https://shop.example?", {}, "must not have a path"),
        ("AFTERTOUCH_BASE_URL", "https://shop.example/#", {}, "must not have a path"),
        ("AFTERTOUCH_BASE_URL", "https://shop.example\t", {}, "must be an address"),
        ("AFTERTOUCH_BASE_URL", "https://shop .example", {}, "must be an address"),
        ("AFTERTOUCH_BASE_URL", "shop.example", {}, "must be an address"),
        ("AFTERTOUCH_BASE_URL", "HTTPS://shop.example", {}, "must be an address like https://"),
        ("AFTERTOUCH_BASE_URL", "ftp://shop.example", {}, "must be an address"),
        ("AFTERTOUCH_BASE_URL", "https://ops:s3cret@shop.example", {}, "must be an address"),
        ("AFTERTOUCH_LINK_BASE_URL", "https://go.example.com/?from=sms", {}, "must be an address"),
        ("AFTERTOUCH_LINK_BASE_URL", "https://go.example.com/#a", {}, "must be an address"),
        ("AFTERTOUCH_LINK_BASE_URL", "https://go.example.com:99999", {}, "must be an address"),
        ("AFTERTOUCH_LINK_BASE_URL", "https://go.example.com/a b", {}, "must be an address"),
        ("AFTERTOUCH_LINK_BASE_URL", "https://商店.example", {}, "in ASCII"),
        ("AFTERTOUCH_WORKER_MAX", "2", {"AFTERTOUCH_WORKER_MIN": "3"}, "AFTERTOUCH_WORKER_MIN, which is 3"),
        ("AFTERTOUCH_WORKER_MAX", "2", {"AFTERTOUCH_RABBITMQ_QUORUM": "true"}, "AFTERTOUCH_RABBITMQ_QUORUM"),
        ("AFTERTOUCH_SOCKET_ORIGINS", "shop.example.com", {}, "must be an origin"),
        ("AFTERTOUCH_SOCKET_ORIGINS", "https://shop.example.com/chat", {}, "must be an origin"),
        ("AFTERTOUCH_SOCKET_ORIGINS", "ftp://shop.example.com", {}, "must be an origin"),
        ("AFTERTOUCH_SOCKET_ORIGINS", "*", {}, "must be an origin"),
        ("AFTERTOUCH_SOCKET_ORIGINS", "https://", {}, "must be an origin"),
        ("AFTERTOUCH_SOCKET_ORIGINS", "https://shop.example.com:443", {}, "must be an origin"),
        ("AFTERTOUCH_SOCKET_ORIGINS", "https://shop.example.com:x", {}, "must be an origin"),
        ("AFTERTOUCH_SOCKET_ORIGINS", "https://商店.example", {}, "must be an origin"),
        ("AFTERTOUCH_SOCKET_ORIGINS", "https://shop.example.com:", {}, "must be an origin"),
        ("AFTERTOUCH_SOCKET_ORIGINS", "https://shop.example.com:08443", {}, "must be an origin"),
        ("AFTERTOUCH_SOCKET_ORIGINS", "https://shop .example.com", {}, "must be an origin"),
        ("AFTERTOUCH_SOCKET_ORIGINS", "https://shop.example.com\\a", {}, "must be an origin"),
        ("AFTERTOUCH_SESSIONS_REDIS_URL", "http://h1", {}, "must be redis://"),
        ("AFTERTOUCH_SESSIONS_REDIS_URL", "cluster://h1:6379;cluster://h2:6379", {}, "a cluster is redis+cluster://"),
        ("AFTERTOUCH_GATEWAY_REDIS_URL", "h1:6379", {}, "must be redis://"),
        ("REDIS_URL", "redis+cluster://h1:6379", {}, "AFTERTOUCH_SESSIONS_REDIS_URL"),
        ("AFTERTOUCH_OIDC_ISSUER", "id.example.com", OIDC, ""),
        ("AFTERTOUCH_OIDC_ISSUER", "https://user@id.example.com", OIDC, ""),
        ("AFTERTOUCH_OIDC_CLIENT_ID", "", OIDC, ""),
        ("AFTERTOUCH_OIDC_CLIENT_SECRET", "", OIDC, ""),
        ("AFTERTOUCH_OIDC_GROUP_MAP", "ops", OIDC, ""),
        ("AFTERTOUCH_OIDC_GROUP_MAP", "ops=chief", OIDC, ""),
        ("AFTERTOUCH_REQUIRE_TOTP", "perhaps", OIDC, ""),
        ("AFTERTOUCH_OIDC_ONLY", "true", {}, "needs AFTERTOUCH_OIDC_ISSUER"),
        ("AFTERTOUCH_OIDC_LINK_BY_EMAIL", "true", {}, "needs AFTERTOUCH_OIDC_ISSUER"),
    ],
)
def test_invalid_setting_is_named(name: str, value: str, others: dict[str, str], words: str) -> None:
    said = refusal_of(**{**others, name: value, "AFTERTOUCH_FLOWER_PORT": "x"})
    assert words in next(line for line in said.splitlines() if line.startswith(f"  {name}: "))
    assert "  AFTERTOUCH_FLOWER_PORT: " in said, "all are named"
    assert "s3cret" not in said


def test_fitting_settings_are_accepted() -> None:
    Environment(aftertouch_worker_min=2, aftertouch_worker_max=2)
    assert Environment(aftertouch_base_url="https://shop.example/").aftertouch_base_url == "https://shop.example"
    listed = "https://Shop.example.com,http://[::1]:3000"
    origins = Environment(aftertouch_socket_origins=listed).aftertouch_socket_origins  # type: ignore[arg-type]
    assert origins == ["https://shop.example.com", "http://[::1]:3000"]
    for url in ("redis://:p%40@h1:6379/3", "sentinel://h1:1;sentinel://h2:2", "rediss+cluster://u:p@h1:6379,h2"):
        assert Environment(aftertouch_sessions_redis_url=url).aftertouch_sessions_redis_url == url


def test_group_map_accepts_names_of_ldap(monkeypatch: pytest.MonkeyPatch) -> None:
    for key, text in {**OIDC, "AFTERTOUCH_OIDC_GROUP_MAP": "cn=ops=operator, it = administrator"}.items():
        monkeypatch.setenv(key, text)
    assert Environment().aftertouch_oidc_group_map == {"cn=ops": "operator", "it": "administrator"}


def test_roles_of_the_environment_match_the_model() -> None:
    from scheduling.models import Role

    assert list(Role.values) == list(ROLES)


@each_row("name", ["DATABASE_URL", "DATABASE_REPLICA_URL"])
@each_row(
    "url",
    [
        "mysql://a:hidden@db/a", "postgresql://a:hidden@db", "postgresql://a:hidden@db:port/a", "hidden",
        "postgresql://a:hidden@db/a?sslmod=require", "postgresql://a:hidden@h1:5432,h2:x/a", "postgresql://a:hidden@[db/a",
        "postgresql://a:hidden@h1,h2:0/a",
    ],
)  # fmt: skip
def test_wrong_database_address_is_refused_without_its_text(name: str, url: str) -> None:
    said = refusal_of(**{name: url})
    assert f"{name}: Value error" in said
    assert "hidden" not in said


def test_refusal_of_a_database_address_names_the_problem() -> None:
    url = "postgresql://a@db/a"
    said = refusal_of(DATABASE_URL=url, DATABASE_REPLICA_URL=url)
    assert "DATABASE_REPLICA_URL: Value error, must not be the address of DATABASE_URL" in said
    assert "“sslmod” is not a parameter of libpq" in refusal_of(DATABASE_URL="postgresql://a@db/a?sslmod=require")


@each_row(
    "query",
    [
        "sslmode=verify-full&sslrootcert=/ca.pem", "target_session_attrs=read-write&load_balance_hosts=random",
        "channel_binding=require&gssencmode=disable", "connect_timeout=7&application_name=shop&passfile=/p",
    ],
)  # fmt: skip
def test_parameters_of_a_database_address_reach_the_driver(query: str) -> None:
    url = f"postgresql://a:b%40c@h1:5432,h2:5433/a?{query}"
    Environment(database_url=url)
    database = build_database(url, prepare_statements=True)
    assert [database[name] for name in ("HOST", "PORT", "NAME", "USER", "PASSWORD")] == [
        "h1,h2", "5432,5433", "a", "a", "b@c",
    ]  # fmt: skip
    assert database["OPTIONS"].items() >= dict(pair.split("=") for pair in query.split("&")).items()


@each_row("hosts", ["h1,h2", "h1:5433,h2", "h1,h2:5433", "h1:5433,h2:5433"])
def test_several_hosts_without_ports_are_accepted(hosts: str) -> None:
    url = f"postgresql://a@{hosts}/a"
    Environment(database_url=url)
    writable = build_database(url, prepare_statements=True)["OPTIONS"]
    assert writable["target_session_attrs"] == "read-write"
    assert "target_session_attrs" not in build_database(url, prepare_statements=True, writes=False)["OPTIONS"]


def test_question_mark_in_a_password_starts_no_parameters() -> None:
    for url, password in (("postgresql://u:pa?x@h:5432/db", "pa?x"), ("postgresql://u:p?a=b&x@h/db", "p?a=b&x")):
        Environment(database_url=url)
        assert build_database(url, prepare_statements=True)["PASSWORD"] == password
        assert (read_query(url), read_query(f"{url}?sslmode=require")) == ("", "sslmode=require")
    said = refusal_of(DATABASE_URL="postgresql://u:pa?hidden@h:5432?db")
    assert "must be postgresql://" in said
    assert "hidden" not in said


def test_options_of_a_database_address_add_to_ours() -> None:
    database = build_database("postgresql://a@db/a?options=-c%20work_mem%3D9MB", prepare_statements=True)
    assert database["OPTIONS"]["options"] == "-c idle_in_transaction_session_timeout=60s -c work_mem=9MB"


def test_service_link_of_kubernetes_is_ignored(capsys: pytest.CaptureFixture[str]) -> None:
    assert Environment(aftertouch_port="tcp://10.0.0.1:8000").aftertouch_port == 8000  # type: ignore[arg-type]
    assert "AFTERTOUCH_PORT: tcp://10.0.0.1:8000 of a service link is ignored" in capsys.readouterr().err


def test_time_zone_of_the_installation_is_a_setting() -> None:
    program = (
        "import django; django.setup(); from django.conf import settings; from celery import current_app;"
        "from scheduling.configuration.snapshot import calendars_spec; from scheduling.models import Calendar;"
        "print(settings.TIME_ZONE, current_app.conf.timezone, calendars_spec([]).default.timezone, Calendar().timezone)"
    )
    env = {**os.environ, "AFTERTOUCH_TIME_ZONE": "Europe/Berlin", "DJANGO_SETTINGS_MODULE": "config.settings.local"}
    done = subprocess.run(
        [sys.executable, "-c", f"import config.celery.application; {program}"],
        cwd=ROOT, env=env, text=True, capture_output=True, timeout=180, check=True,
    )  # fmt: skip
    assert done.stdout.split() == ["Europe/Berlin"] * 4


SECRET_KEY = "0123456789abcdef" * 4
PRODUCTION = {
    "DATABASE_URL": "postgresql://a@127.0.0.1:1/a",
    "REDIS_URL": "redis://127.0.0.1:1/0",
    "DJANGO_SECRET_KEY": SECRET_KEY,
    "DJANGO_ALLOWED_HOSTS": "aftertouch.example",
    "AFTERTOUCH_BASE_URL": "https://aftertouch.example",
    "AFTERTOUCH_SECRETS_KEYS": f"{SECRET_KEY[:43]},{SECRET_KEY[:32]}",
}


def load(module: str, **env: str) -> subprocess.CompletedProcess[str]:
    """Import an entry point and print its settings."""
    ours = {name: value for name, value in os.environ.items() if not name.startswith(("DJANGO_", "AFTERTOUCH_"))}
    code = f"import {module}; from django.conf import settings; print(settings.SETTINGS_MODULE, settings.SECRET_KEY)"
    return subprocess.run(
        [sys.executable, "-c", code],
        cwd=ROOT, env={**ours, **env}, text=True, capture_output=True, timeout=180, check=False,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("secret_key", "secrets_keys", "time_scale"),
    [
        ("x", SECRET_KEY[:42], "2.5"),
        (SECRET_KEY[:49], "x" * 64, "0.5"),
        ("x" * 64, f"{SECRET_KEY},{SECRET_KEY[:31]}", "3"),
    ],
)
def test_weak_production_values_stop_start_without_their_text(
    tmp_path: Path, secret_key: str, secrets_keys: str, time_scale: str
) -> None:
    weak = {
        "DJANGO_SECRET_KEY": secret_key, "AFTERTOUCH_SECRETS_KEYS": secrets_keys, "AFTERTOUCH_TIME_SCALE": time_scale,
    }  # fmt: skip
    refused = load("config.settings.production", **{**PRODUCTION, "AFTERTOUCH_STATE_DIR": str(tmp_path), **weak})
    assert refused.returncode == 1
    assert {line.split(":")[0].strip() for line in refused.stderr.splitlines()[1:]} == set(weak)
    assert secret_key not in refused.stderr
    assert secrets_keys not in refused.stderr


def test_celery_finds_the_application_from_its_script(tmp_path: Path) -> None:
    """Other than a module, a script does not search the working directory."""
    done = subprocess.run(
        [Path(sys.executable).with_name("celery"), "-A", "config", "report"], cwd=ROOT, text=True, capture_output=True,
        timeout=180, check=False, env={**os.environ, **PRODUCTION, "AFTERTOUCH_STATE_DIR": str(tmp_path)},
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr


def test_entry_point_without_settings_uses_production(tmp_path: Path) -> None:
    for module in ("config.asgi", "config.celery.application"):
        refused = load(module, AFTERTOUCH_STATE_DIR=str(tmp_path))
        assert refused.returncode == 1, module
        assert "DJANGO_SECRET_KEY: must be set in production" in refused.stderr, module
    started = load("config.asgi", **PRODUCTION, AFTERTOUCH_STATE_DIR=str(tmp_path))
    assert started.stdout.split() == ["config.settings.production", SECRET_KEY], started.stderr
