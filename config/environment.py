"""Settings from environment variables, read once at start.

An invalid value stops the start with the name of the variable. Unset server addresses mean the embedded servers of
this checkout (see `config.local.servers`). Their addresses are in the state directory while they run.
"""

from __future__ import annotations

import re
import sys
from datetime import timedelta
from functools import cache
from pathlib import Path
from socket import gethostname
from typing import Annotated, Any
from urllib.parse import parse_qsl, urlsplit
from zoneinfo import available_timezones

from psycopg import ProgrammingError
from psycopg.conninfo import conninfo_to_dict
from psycopg.pq import Conninfo
from pydantic import BeforeValidator, Field, SecretStr, ValidationError, ValidationInfo, field_validator
from pydantic_settings import BaseSettings, NoDecode, SettingsConfigDict

from config.local.endpoints import read_endpoints
from scheduling.server_addresses import is_cluster, is_verified, parse_options, parse_redis, parse_sentinel_options

ROOT = Path(__file__).resolve().parent.parent
#: The values of `scheduling.models.Role`, which needs Django's settings.
ROLES = ("viewer", "operator", "editor", "command editor", "administrator")
PLACEHOLDER_POSTGRES = "postgresql://aftertouch@127.0.0.1:1/aftertouch"
PLACEHOLDER_REDIS = "redis://127.0.0.1:1/0"
IMPLIED_PORTS = {("http", 80), ("https", 443)}


def _split_commas(value: Any) -> Any:
    return [part.strip() for part in value.split(",") if part.strip()] if isinstance(value, str) else value


CommaSeparated = Annotated[list[str], NoDecode, BeforeValidator(_split_commas)]
CommaSeparatedSecrets = Annotated[list[SecretStr], NoDecode, BeforeValidator(_split_commas)]


class Environment(BaseSettings):
    """All environment variables of Aftertouch. A field name is the variable's name in lower case."""

    model_config = SettingsConfigDict(case_sensitive=False, extra="ignore", env_ignore_empty=True)

    database_url: str = ""
    database_replica_url: str = ""
    redis_url: str = ""
    celery_broker_url: str = ""
    django_secret_key: SecretStr = SecretStr("")
    django_allowed_hosts: CommaSeparated = []
    django_csrf_trusted_origins: CommaSeparated = []
    django_debug: bool = False
    django_log_level: str = Field("INFO", pattern=r"^(DEBUG|INFO|WARNING|ERROR)$")

    aftertouch_role: str = Field("all", pattern=r"^(all|web|core|beat|watcher|execution|flower|metrics)$")
    aftertouch_state_dir: Path = ROOT / ".state"
    aftertouch_metrics_dir: Path | None = None
    aftertouch_metrics_address: str = "127.0.0.1"
    aftertouch_metrics_port: int = Field(9102, ge=1, le=65535)
    aftertouch_metrics_cluster: bool = False
    aftertouch_host: str = "127.0.0.1"
    aftertouch_port: int = Field(8000, ge=1, le=65535)
    aftertouch_flower_port: int = Field(5555, ge=1, le=65535)
    aftertouch_flower_auth: SecretStr = SecretStr("")
    flower_basic_auth: SecretStr = SecretStr("")
    aftertouch_base_url: str = ""
    aftertouch_link_base_url: str = ""
    aftertouch_environment: str = Field("", max_length=30)
    aftertouch_time_zone: str = "Asia/Shanghai"
    aftertouch_time_scale: float = Field(1.0, gt=0, le=10_000_000)
    aftertouch_allowed_private_hosts: CommaSeparated = []
    aftertouch_http_proxy: SecretStr = SecretStr("")
    aftertouch_horizon: timedelta = Field(timedelta(seconds=30), gt=timedelta(seconds=5), le=timedelta(seconds=120))
    aftertouch_dispatch_window: int = Field(5_000, ge=100, le=1_000_000)
    aftertouch_slot_hold: timedelta = Field(timedelta(seconds=60), ge=timedelta(0), le=timedelta(hours=1))
    aftertouch_journey_depth: int = Field(5, ge=1, le=50)
    aftertouch_inactive_after: timedelta = Field(timedelta(days=30), ge=timedelta(hours=1))
    aftertouch_api_rate_per_minute: int = Field(60_000, ge=1)
    aftertouch_rpa_slots: int = Field(5, ge=1, le=64)
    aftertouch_rpa_ageing: timedelta = Field(timedelta(minutes=10), ge=timedelta(seconds=1))
    aftertouch_rpa_home_lease: timedelta = Field(timedelta(minutes=2), ge=timedelta(seconds=30), le=timedelta(days=30))
    aftertouch_rpa_takeover_idle: timedelta = Field(
        timedelta(minutes=10), ge=timedelta(seconds=5), le=timedelta(hours=2)
    )
    aftertouch_rpa_takeover_files_mb: int = Field(100, ge=1, le=2000)
    aftertouch_rpa_browsers: int = Field(8, ge=1, le=64)
    aftertouch_rpa_warm_browsers: int = Field(2, ge=0, le=64)
    aftertouch_rpa_browser_wait: timedelta = Field(timedelta(seconds=10), gt=timedelta(0), le=timedelta(seconds=60))
    aftertouch_rpa_browser_uses: int = Field(200, ge=1)
    aftertouch_rpa_browser_age: timedelta = Field(timedelta(hours=4), ge=timedelta(minutes=1))
    aftertouch_rpa_browser_memory_mb: int = Field(1500, ge=100)
    aftertouch_partition_days: int = Field(7, ge=1, le=31)
    aftertouch_retention_days: int = Field(90, ge=7, le=3650)
    aftertouch_disabled_target_days: int = Field(90, ge=1, le=3650)
    aftertouch_webhook_retention_days: int = Field(7, ge=1, le=365)
    aftertouch_vendor_ids_days: int = Field(30, ge=1, le=3650)
    aftertouch_audit_days: int = Field(365, ge=365, le=3650)
    aftertouch_rpa_retention_days: int = Field(90, ge=7, le=3650)
    aftertouch_rpa_evidence_kept: timedelta = Field(timedelta(days=14), ge=timedelta(hours=1))
    aftertouch_node: str = Field(default_factory=gethostname, max_length=100)
    aftertouch_rpa_echo_url: str = Field("https://api.ipify.org", pattern=r"^https?://")
    rpa_chromium_path: str = ""
    aftertouch_rpa_isolation: str = Field("bubblewrap", pattern=r"^(bubblewrap|none)$")
    aftertouch_rpa_extensions_dir: str = ""
    aftertouch_rpa_paths: CommaSeparated = []
    aftertouch_silence_backlog: int = Field(5_000, ge=1)
    aftertouch_silence_stale: timedelta = Field(timedelta(minutes=5), ge=timedelta(seconds=10), le=timedelta(hours=1))
    aftertouch_silence_rate: int = Field(5_000, ge=1, le=100_000)
    aftertouch_conversation_window: timedelta = Field(
        timedelta(minutes=10), ge=timedelta(seconds=1), le=timedelta(hours=24)
    )
    aftertouch_sessions_redis_url: str = ""
    aftertouch_gateway_redis_url: str = ""
    aftertouch_session_sockets: int = Field(10, ge=1, le=1_000)
    aftertouch_token_sockets: int = Field(5, ge=1, le=1_000)
    aftertouch_socket_origins: CommaSeparated = []
    aftertouch_chatwoot_secret: SecretStr = SecretStr("")
    aftertouch_rocketchat_token: SecretStr = SecretStr("")
    aftertouch_worker_concurrency: int = Field(2, ge=1, le=256)
    aftertouch_web_workers: int = Field(1, ge=1, le=64)
    aftertouch_prepare_statements: bool = True
    aftertouch_replica_lag_limit: timedelta = Field(
        timedelta(seconds=30), ge=timedelta(seconds=1), le=timedelta(seconds=60)
    )
    aftertouch_sentinel_master: str = "aftertouch"
    aftertouch_sentinel_url_options: SecretStr = SecretStr("")
    aftertouch_rabbitmq_quorum: bool = False
    aftertouch_worker_min: int = Field(1, ge=1, le=256)
    aftertouch_worker_max: int | None = Field(None, ge=0, le=256)
    aftertouch_worker_shrink_after: timedelta = Field(
        timedelta(seconds=30), ge=timedelta(seconds=1), le=timedelta(hours=1)
    )
    aftertouch_secrets_keys: CommaSeparatedSecrets = []
    aftertouch_rpa_secrets_keys: CommaSeparatedSecrets = []
    aftertouch_email_url: str = ""
    aftertouch_login_tries: int = Field(5, ge=1, le=1000)
    aftertouch_login_lockout: timedelta = Field(timedelta(minutes=15), ge=timedelta(minutes=1), le=timedelta(days=1))
    aftertouch_email_from: str = "aftertouch@localhost"
    aftertouch_require_totp: bool = False
    aftertouch_oidc_issuer: str = ""
    aftertouch_oidc_client_id: str = Field("", validate_default=True)
    aftertouch_oidc_client_secret: SecretStr = Field(SecretStr(""), validate_default=True)
    aftertouch_oidc_group_claim: str = Field("groups", min_length=1, max_length=200)
    aftertouch_oidc_group_map: Annotated[dict[str, str], NoDecode] = {}
    aftertouch_oidc_link_by_email: bool = False
    aftertouch_oidc_only: bool = False

    @field_validator("database_url", "database_replica_url")
    @classmethod
    def require_postgres_address(cls, url: str, others: ValidationInfo) -> str:
        """Accept an address with a database and parameters of libpq. The error has no part of it: it has a password."""
        if not url:
            return url
        query = read_query(url)
        known = {each.keyword.decode() for each in Conninfo.get_defaults()} | {"ssl"}  # as libpq, for JDBC's addresses
        unknown = [name for name, _ in parse_qsl(query, True) if name not in known]
        if unknown and _read_conninfo(url.removesuffix(f"?{query}")).get("dbname"):
            raise ValueError(f"“{unknown[0]}” is not a parameter of libpq")
        given = _read_conninfo(url)
        ports = str(given.get("port") or "").split(",")
        if not given.get("dbname") or not all(
            not port or (port.isdecimal() and 0 < int(port) < 65_536) for port in ports
        ):
            raise ValueError("must be postgresql://user:password@host:5432/name")
        if others.field_name == "database_replica_url" and not given.get("host"):
            raise ValueError("must name a host")
        if others.field_name == "database_replica_url" and url and url == others.data.get("database_url"):
            raise ValueError("must not be the address of DATABASE_URL")
        return url

    @field_validator("aftertouch_port", "aftertouch_flower_port", "aftertouch_metrics_port", mode="before")
    @classmethod
    def ignore_service_link(cls, value: Any, field: ValidationInfo) -> Any:
        """Kubernetes sets `AFTERTOUCH_PORT=tcp://…` beside a service with the name `aftertouch`."""
        if not (isinstance(value, str) and value.startswith("tcp://")):
            return value
        name = str(field.field_name)
        default = cls.model_fields[name].default
        sys.stderr.write(f"{name.upper()}: {value} of a service link is ignored; it is {default}\n")
        return default

    @field_validator("aftertouch_base_url")
    @classmethod
    def require_base_without_path(cls, url: str) -> str:
        if url and not _is_web_address(url):
            raise ValueError("must be an address like https://aftertouch.example.com, without a user")
        if url and (urlsplit(url).path.strip("/") or not _is_without_query(url)):
            raise ValueError("must not have a path: Aftertouch has a host name of its own")
        return url.rstrip("/")

    @field_validator("aftertouch_time_zone")
    @classmethod
    def require_time_zone(cls, name: str) -> str:
        if name not in available_timezones():
            raise ValueError("must be a name of the IANA time zone database, such as Asia/Shanghai")
        return name

    @field_validator("aftertouch_link_base_url")
    @classmethod
    def require_web_address(cls, url: str) -> str:
        if url and not (_is_web_address(url) and _is_without_query(url)):
            raise ValueError("must be an address like https://go.example.com, without user and query")
        if not url.isascii():
            raise ValueError("must be an address in ASCII; write a name in other letters in Punycode (xn--…)")
        return url

    @field_validator("aftertouch_http_proxy")
    @classmethod
    def require_proxy(cls, proxy: SecretStr) -> SecretStr:
        if address := proxy.get_secret_value():
            from scheduling.channels.ssrf import parse_proxy  # not for programs without a proxy

            parse_proxy(address)
        return proxy

    @field_validator("aftertouch_oidc_issuer")
    @classmethod
    def require_issuer(cls, url: str) -> str:
        if url and not (_is_web_address(url) and _is_without_query(url)):
            raise ValueError("must be an address like https://id.example.com, without query and user name")
        return url

    @field_validator("aftertouch_oidc_client_id", "aftertouch_oidc_client_secret")
    @classmethod
    def require_with_issuer(cls, value: Any, others: ValidationInfo) -> Any:
        text = value.get_secret_value() if isinstance(value, SecretStr) else value
        if others.data.get("aftertouch_oidc_issuer") and not text:
            raise ValueError("must be set where AFTERTOUCH_OIDC_ISSUER is")
        return value

    @field_validator("aftertouch_oidc_group_map", mode="before")
    @classmethod
    def parse_group_map(cls, value: Any) -> Any:
        """Parse `claim value=role`, separated by commas. A claim value may contain `=`, as names of LDAP do."""
        if not isinstance(value, str):
            return value
        pairs = [part.strip().rpartition("=") for part in value.split(",") if part.strip()]
        for group, _, role in pairs:
            if not group or role.strip() not in ROLES:
                raise ValueError(f"“{group}={role}” must be a claim value, = and one of {', '.join(ROLES)}")
        return {group.strip(): role.strip() for group, _, role in pairs}

    @field_validator("aftertouch_oidc_link_by_email", "aftertouch_oidc_only", "aftertouch_oidc_group_map")
    @classmethod
    def refuse_without_issuer(cls, value: Any, others: ValidationInfo) -> Any:
        if value and not others.data.get("aftertouch_oidc_issuer"):
            raise ValueError("needs AFTERTOUCH_OIDC_ISSUER")
        return value

    @field_validator("redis_url", "celery_broker_url", "aftertouch_sessions_redis_url", "aftertouch_gateway_redis_url")
    @classmethod
    def require_server_address(cls, url: str, field: ValidationInfo) -> str:
        if field.field_name in ("redis_url", "celery_broker_url") and is_cluster(url):
            raise ValueError("a Redis Cluster holds live chats only; its address is AFTERTOUCH_SESSIONS_REDIS_URL")
        if url:
            (parse_options if field.field_name == "celery_broker_url" else parse_redis)(url)
        return url

    @field_validator("aftertouch_sentinel_url_options")
    @classmethod
    def require_sentinel_options(cls, query: SecretStr) -> SecretStr:
        parse_sentinel_options(query.get_secret_value())
        return query

    @field_validator("aftertouch_socket_origins")
    @classmethod
    def require_origins(cls, origins: list[str]) -> list[str]:
        for origin in origins:
            if not (_is_web_address(origin.lower()) and origin.isascii() and origin.lower() == _build_origin(origin)):
                raise ValueError(f"{origin} must be an origin, such as https://shop.example.com")
        return [origin.lower() for origin in origins]

    @field_validator("aftertouch_rpa_paths")
    @classmethod
    def require_absolute_paths(cls, paths: list[str]) -> list[str]:
        for path in paths:
            if not Path(path).is_absolute():
                raise ValueError(f"{path} must start with /")
        return paths

    @field_validator("aftertouch_worker_max")
    @classmethod
    def fit_the_other_settings(cls, most: int | None, others: ValidationInfo) -> int | None:
        least = others.data.get("aftertouch_worker_min", 1)
        if most and most < least:
            raise ValueError(f"must not be less than AFTERTOUCH_WORKER_MIN, which is {least}")
        if most and others.data.get("aftertouch_rabbitmq_quorum"):
            raise ValueError("a pool cannot grow on quorum queues (AFTERTOUCH_RABBITMQ_QUORUM); start more workers")
        return most

    @property
    def postgres(self) -> str:
        endpoints = read_endpoints(self.aftertouch_state_dir)
        return self.database_url or (endpoints.database_url if endpoints else PLACEHOLDER_POSTGRES)

    @property
    def redis(self) -> str:
        endpoints = read_endpoints(self.aftertouch_state_dir)
        return self.redis_url or (endpoints.redis_url if endpoints else PLACEHOLDER_REDIS)

    @property
    def broker(self) -> str:
        return self.celery_broker_url or self.redis

    @property
    def sentinel_options(self) -> dict[str, Any]:
        """Return the keyword arguments of redis-py for the Sentinels: login and TLS, and no repetition."""
        # By default redis-py repeats for seconds what the next Sentinel answers at once.
        return {"retry": None, **parse_sentinel_options(self.aftertouch_sentinel_url_options.get_secret_value())}

    @property
    def unverified_servers(self) -> list[str]:
        """Return the variables that switch the verification of a certificate or of its name off."""
        names = ("redis_url", "celery_broker_url", "aftertouch_sessions_redis_url", "aftertouch_gateway_redis_url")
        options = {name: parse_options(url) for name in names if (url := getattr(self, name))}
        options["aftertouch_sentinel_url_options"] = self.sentinel_options
        return [name.upper() for name, each in options.items() if not is_verified(each)]


def _is_web_address(url: str) -> bool:
    """Return whether it has a host, no user, no white space or backslash, and a valid port or none."""
    address = urlsplit(url)
    try:
        has_port = address.port != 0
    except ValueError:
        return False
    is_web = url.startswith(("http://", "https://")) and address.hostname and not re.search(r"[\s\\]", url)
    return bool(is_web and "@" not in address.netloc and has_port)


def _is_without_query(url: str) -> bool:
    return not {"?", "#"} & set(url)


def _build_origin(url: str) -> str:
    """Return the origin as browsers send it: without a path, and without the port that the scheme implies."""
    address = urlsplit(url)
    host = f"[{address.hostname}]" if ":" in (address.hostname or "") else address.hostname
    has_port = address.port and (address.scheme, address.port) not in IMPLIED_PORTS
    return f"{address.scheme}://{host}" + (f":{address.port}" if has_port else "")


def read_query(url: str) -> str:
    """Return the parameters of a PostgreSQL address. As for libpq, a password may contain a question mark."""
    rest = url.partition("://")[2]
    sign_in, _at, address = rest.partition("@")
    return (rest if "/" in sign_in or not address else address).partition("?")[2]


def _read_conninfo(url: str) -> dict[str, Any]:
    """Return the parameters of a PostgreSQL address, {} for others."""
    try:
        return dict(conninfo_to_dict(url)) if url.startswith(("postgresql://", "postgres://")) else {}
    except ProgrammingError:
        return {}


@cache
def environment() -> Environment:
    """Return the settings of this process. Exit with a list of invalid variables, if there are any."""
    try:
        return Environment()  # type: ignore[call-arg,unused-ignore]
    except ValidationError as error:
        lines = [f"  {str(item['loc'][0]).upper()}: {item['msg']}" for item in error.errors()]
        sys.exit("Aftertouch cannot start. Invalid settings:\n" + "\n".join(lines))
