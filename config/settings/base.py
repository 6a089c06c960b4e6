"""Settings common to all environments. Values that differ are read from `config.environment`."""

from __future__ import annotations

from pathlib import Path

from django.utils.translation import gettext_lazy as _

from config.environment import ROOT, environment, read_query
from config.settings.connections import Timeouts, build_database

ENV = environment()
BASE_DIR = ROOT

DEBUG = False
SECRET_KEY = ENV.django_secret_key.get_secret_value() or "local-only-secret-key-never-used-in-production"
ALLOWED_HOSTS = ENV.django_allowed_hosts or ["localhost", "127.0.0.1", "[::1]"]
CSRF_TRUSTED_ORIGINS = ENV.django_csrf_trusted_origins

INSTALLED_APPS = [
    "unfold.apps.BasicAppConfig",  # without a site of its own
    "unfold.contrib.filters",
    "unfold.contrib.simple_history",
    "scheduling.apps.BackOfficeConfig",
    "django.contrib.auth",
    "django.contrib.contenttypes",
    "django.contrib.sessions",
    "django.contrib.messages",
    "django.contrib.staticfiles",
    "django_celery_beat",
    "simple_history",
    "channels",
    "ninja",  # serves the bundled Swagger files, so that the API page needs no CDN
    "scheduling",
    "rpa_tasks",
    "sessions",
]

MIDDLEWARE = [
    "scheduling.web.middleware.page_headers_middleware",
    "django.middleware.security.SecurityMiddleware",
    "whitenoise.middleware.WhiteNoiseMiddleware",
    "django.contrib.sessions.middleware.SessionMiddleware",
    "django.middleware.locale.LocaleMiddleware",
    "scheduling.web.middleware.refuse_nul_middleware",
    "django.middleware.common.CommonMiddleware",
    "django.middleware.csrf.CsrfViewMiddleware",
    "django.contrib.auth.middleware.AuthenticationMiddleware",
    "django.contrib.messages.middleware.MessageMiddleware",
    "django.middleware.clickjacking.XFrameOptionsMiddleware",
    "simple_history.middleware.HistoryRequestMiddleware",
    "scheduling.web.middleware.own_writes_middleware",
]

ROOT_URLCONF = "config.urls"
ASGI_APPLICATION = "config.asgi.application"

TEMPLATES = [
    {
        "BACKEND": "django.template.backends.django.DjangoTemplates",
        "DIRS": [BASE_DIR / "templates"],
        "APP_DIRS": True,
        "OPTIONS": {
            "builtins": ["scheduling.admin.shown_values"],
            "context_processors": [
                "django.template.context_processors.request",
                "django.contrib.auth.context_processors.auth",
                "django.contrib.messages.context_processors.messages",
            ],
        },
    }
]

DATABASE_PARAMETERS = f"?{query}" if (query := read_query(ENV.postgres)) else ""  # for flows that get the address
DATABASES = {"default": build_database(ENV.postgres, prepare_statements=ENV.aftertouch_prepare_statements)}
if ENV.database_replica_url:
    DATABASES["replica"] = build_database(
        ENV.database_replica_url, prepare_statements=ENV.aftertouch_prepare_statements, connect_timeout=2, writes=False
    )
DATABASE_ROUTERS = ["scheduling.replica.ReadRouter"]
AFTERTOUCH_REPLICA_LAG_LIMIT = ENV.aftertouch_replica_lag_limit
DEFAULT_AUTO_FIELD = "django.db.models.BigAutoField"

REDIS_URL = ENV.redis
AFTERTOUCH_SENTINEL_MASTER = ENV.aftertouch_sentinel_master
#: Of the Sentinels themselves, as keyword arguments of redis-py.
AFTERTOUCH_SENTINEL_OPTIONS = ENV.sentinel_options
#: Names of variables (`scheduling.checks.check_verification`).
UNVERIFIED_SERVERS = ENV.unverified_servers

LANGUAGE_CODE = "zh-hans"
LANGUAGES = [("zh-hans", _("Simplified Chinese")), ("en", _("English"))]
FORMAT_MODULE_PATH = "config.formats"
LOCALE_PATHS = [BASE_DIR / "config/locale", BASE_DIR / "config/third_party/locale"]
TIME_ZONE = ENV.aftertouch_time_zone
USE_I18N = True
USE_TZ = True

STATIC_URL = "/static/"
STATIC_ROOT = ENV.aftertouch_state_dir / "static"
STORAGES = {
    "default": {"BACKEND": "django.core.files.storage.FileSystemStorage"},
    "staticfiles": {"BACKEND": "whitenoise.storage.CompressedStaticFilesStorage"},
}
WHITENOISE_USE_FINDERS = True

LOGIN_URL = "admin:login"
AUTH_PASSWORD_VALIDATORS = [
    {"NAME": "django.contrib.auth.password_validation.UserAttributeSimilarityValidator"},
    {"NAME": "django.contrib.auth.password_validation.MinimumLengthValidator", "OPTIONS": {"min_length": 10}},
    {"NAME": "django.contrib.auth.password_validation.CommonPasswordValidator"},
]
# The first backend only limits failed logins. The second authenticates.
AUTHENTICATION_BACKENDS = ["scheduling.web.login_lockout.Lockout", "django.contrib.auth.backends.ModelBackend"]
AFTERTOUCH_LOGIN_TRIES = ENV.aftertouch_login_tries
AFTERTOUCH_LOGIN_LOCKOUT = ENV.aftertouch_login_lockout
AFTERTOUCH_REQUIRE_TOTP = ENV.aftertouch_require_totp
#: "" for no provider.
AFTERTOUCH_OIDC_ISSUER = ENV.aftertouch_oidc_issuer
AFTERTOUCH_OIDC_CLIENT_ID = ENV.aftertouch_oidc_client_id
AFTERTOUCH_OIDC_CLIENT_SECRET = ENV.aftertouch_oidc_client_secret.get_secret_value()
AFTERTOUCH_OIDC_GROUP_CLAIM = ENV.aftertouch_oidc_group_claim
#: Role by value of the claim.
AFTERTOUCH_OIDC_GROUP_MAP = ENV.aftertouch_oidc_group_map
AFTERTOUCH_OIDC_LINK_BY_EMAIL = ENV.aftertouch_oidc_link_by_email
AFTERTOUCH_OIDC_ONLY = ENV.aftertouch_oidc_only
SESSION_ENGINE = "scheduling.identity.sign_ins"
SESSION_COOKIE_AGE = 8 * 3600
SESSION_COOKIE_HTTPONLY = True
DATA_UPLOAD_MAX_MEMORY_SIZE = 1_048_576
FILE_UPLOAD_HANDLERS: list[str] = []  # no page accepts files; an import sends its file in parts

# --- Aftertouch ---------------------------------------------------------------------------------------------------

AFTERTOUCH_ROLE = ENV.aftertouch_role
AFTERTOUCH_STATE_DIR = ENV.aftertouch_state_dir
AFTERTOUCH_METRICS_DIR: Path | None = ENV.aftertouch_metrics_dir or ENV.aftertouch_state_dir / "metrics"
AFTERTOUCH_METRICS_ADDRESS = ENV.aftertouch_metrics_address
AFTERTOUCH_METRICS_PORT = ENV.aftertouch_metrics_port
AFTERTOUCH_METRICS_CLUSTER = ENV.aftertouch_metrics_cluster
AFTERTOUCH_TIME_SCALE = ENV.aftertouch_time_scale
AFTERTOUCH_HORIZON = ENV.aftertouch_horizon
AFTERTOUCH_DISPATCH_WINDOW = ENV.aftertouch_dispatch_window
AFTERTOUCH_SLOT_HOLD = ENV.aftertouch_slot_hold
AFTERTOUCH_JOURNEY_DEPTH = ENV.aftertouch_journey_depth
AFTERTOUCH_INACTIVE_AFTER = ENV.aftertouch_inactive_after
AFTERTOUCH_API_RATE_PER_MINUTE = ENV.aftertouch_api_rate_per_minute
AFTERTOUCH_ALLOWED_PRIVATE_HOSTS = ENV.aftertouch_allowed_private_hosts
AFTERTOUCH_HTTP_PROXY = ENV.aftertouch_http_proxy.get_secret_value()
AFTERTOUCH_WORKER_MIN = ENV.aftertouch_worker_min
AFTERTOUCH_WORKER_MAX = ENV.aftertouch_worker_max
AFTERTOUCH_WORKER_SHRINK_AFTER = ENV.aftertouch_worker_shrink_after
AFTERTOUCH_NODE = ENV.aftertouch_node
AFTERTOUCH_RPA_SLOTS = ENV.aftertouch_rpa_slots
AFTERTOUCH_RPA_HOME_LEASE = ENV.aftertouch_rpa_home_lease
AFTERTOUCH_RPA_AGEING = ENV.aftertouch_rpa_ageing
AFTERTOUCH_RPA_TAKEOVER_IDLE = ENV.aftertouch_rpa_takeover_idle
AFTERTOUCH_RPA_TAKEOVER_FILES_MB = ENV.aftertouch_rpa_takeover_files_mb
AFTERTOUCH_RPA_BROWSERS = ENV.aftertouch_rpa_browsers
AFTERTOUCH_RPA_WARM_BROWSERS = ENV.aftertouch_rpa_warm_browsers
AFTERTOUCH_RPA_BROWSER_WAIT = ENV.aftertouch_rpa_browser_wait
AFTERTOUCH_RPA_BROWSER_USES = ENV.aftertouch_rpa_browser_uses
AFTERTOUCH_RPA_BROWSER_AGE = ENV.aftertouch_rpa_browser_age
AFTERTOUCH_RPA_BROWSER_MEMORY_MB = ENV.aftertouch_rpa_browser_memory_mb
#: Span of a partition of ended touches. A partition is dropped when its newest touch exceeds its retention time.
AFTERTOUCH_PARTITION_DAYS = ENV.aftertouch_partition_days
AFTERTOUCH_RETENTION_DAYS = ENV.aftertouch_retention_days
AFTERTOUCH_DISABLED_TARGET_DAYS = ENV.aftertouch_disabled_target_days
AFTERTOUCH_WEBHOOK_RETENTION_DAYS = ENV.aftertouch_webhook_retention_days
AFTERTOUCH_VENDOR_IDS_DAYS = ENV.aftertouch_vendor_ids_days
AFTERTOUCH_AUDIT_DAYS = ENV.aftertouch_audit_days
AFTERTOUCH_RPA_RETENTION_DAYS = ENV.aftertouch_rpa_retention_days
AFTERTOUCH_RPA_EVIDENCE_KEPT = ENV.aftertouch_rpa_evidence_kept
AFTERTOUCH_RPA_ECHO_URL = ENV.aftertouch_rpa_echo_url
RPA_CHROMIUM_PATH = ENV.rpa_chromium_path
AFTERTOUCH_RPA_ISOLATION = ENV.aftertouch_rpa_isolation
#: If true, commands run without isolation only with the value `none`.
AFTERTOUCH_RPA_ISOLATION_REQUIRED = False
AFTERTOUCH_RPA_EXTENSIONS_DIR = ENV.aftertouch_rpa_extensions_dir
AFTERTOUCH_RPA_PATHS = ENV.aftertouch_rpa_paths
AFTERTOUCH_SILENCE_BACKLOG = ENV.aftertouch_silence_backlog
AFTERTOUCH_SILENCE_STALE = ENV.aftertouch_silence_stale
AFTERTOUCH_SILENCE_RATE = ENV.aftertouch_silence_rate
AFTERTOUCH_CONVERSATION_WINDOW = ENV.aftertouch_conversation_window
AFTERTOUCH_SESSION_SOCKETS = ENV.aftertouch_session_sockets
AFTERTOUCH_TOKEN_SOCKETS = ENV.aftertouch_token_sockets
AFTERTOUCH_SOCKET_ORIGINS = ENV.aftertouch_socket_origins
AFTERTOUCH_CHATWOOT_SECRET = ENV.aftertouch_chatwoot_secret.get_secret_value()
AFTERTOUCH_ROCKETCHAT_TOKEN = ENV.aftertouch_rocketchat_token.get_secret_value()
AFTERTOUCH_SESSIONS_REDIS_URL = ENV.aftertouch_sessions_redis_url
AFTERTOUCH_GATEWAY_REDIS_URL = ENV.aftertouch_gateway_redis_url
AFTERTOUCH_ENVIRONMENT = ENV.aftertouch_environment
AFTERTOUCH_BASE_URL = ENV.aftertouch_base_url or f"http://{ENV.aftertouch_host}:{ENV.aftertouch_port}"
#: Start of redirects for links in messages; "" leaves links as they are.
AFTERTOUCH_LINK_BASE_URL = ENV.aftertouch_link_base_url
#: Where Flower is, and the first of its logins; "" hides the link.
FLOWER_URL = "/flower/"
FLOWER_LOGIN = ENV.flower_basic_auth.get_secret_value().partition(",")[0]
#: Creates a login, and serves the demo chat.
AFTERTOUCH_DEMO = False
TIMEOUTS = Timeouts()
AFTERTOUCH_EMAIL_URL = ENV.aftertouch_email_url
DEFAULT_FROM_EMAIL = ENV.aftertouch_email_from
# The first key encrypts and all keys decrypt. To rotate, insert a new first key.
AFTERTOUCH_SECRETS_KEYS = [key.get_secret_value() for key in ENV.aftertouch_secrets_keys]
AFTERTOUCH_RPA_SECRETS_KEYS = [key.get_secret_value() for key in ENV.aftertouch_rpa_secrets_keys]

CHANNELS = {
    "webhook": "scheduling.channels.webhook.Webhook",
    "wecom": "scheduling.channels.robots.WeCom",
    "dingtalk": "scheduling.channels.robots.DingTalk",
    "feishu": "scheduling.channels.robots.Feishu",
    "wecom_app": "scheduling.channels.vendors.wechat.WeComApp",
    "wechat_kf": "scheduling.channels.vendors.wechat.WeChatService",
    "wechat_official": "scheduling.channels.vendors.wechat.OfficialAccount",
    "wechat_miniprogram": "scheduling.channels.vendors.wechat.MiniProgram",
    "sms_aliyun": "scheduling.channels.vendors.sms.AliyunSms",
    "sms_tencent": "scheduling.channels.vendors.sms.TencentSms",
    "http": "scheduling.channels.vendors.declared.DeclaredHttp",
    "email": "scheduling.channels.email.Email",
    "log": "scheduling.channels.log.Log",
    "inapp": "sessions.inapp_channel.InApp",
    "rpa": "rpa_tasks.channel.Rpa",
}
# Sections of other apps in the configuration file, in storage order: dotted paths of `Section` classes.
CONFIG_SECTIONS = [
    "rpa_tasks.configuration.Platforms",
    "rpa_tasks.configuration.Flows",
    "rpa_tasks.configuration.Shops",
    "sessions.configuration.SilencePolicies",
    "sessions.configuration.Campaigns",
]
# What each app adds to `scheduling`: dotted paths of `scheduling.app_integrations.Integration` objects.
INTEGRATIONS = [
    "scheduling.integration.INTEGRATION",
    "rpa_tasks.integration.INTEGRATION",
    "sessions.integration.INTEGRATION",
]

from config.settings.celery import *  # noqa: E402, F403
from config.settings.logging import *  # noqa: E402, F403
from config.settings.unfold import *  # noqa: E402, F403
