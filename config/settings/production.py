"""Production: every address and secret is given, nothing is guessed."""

from __future__ import annotations

import sys

from config.settings.base import *  # noqa: F403
from config.settings.base import AFTERTOUCH_SECRETS_KEYS, ENV

AFTERTOUCH_DEMO = False

SHORTEST_KEY = 32  #: whoever has the database may guess as long as they like

_required = {
    "DATABASE_URL": ENV.database_url,
    "REDIS_URL": ENV.redis_url,
    "DJANGO_SECRET_KEY": ENV.django_secret_key.get_secret_value(),
    "DJANGO_ALLOWED_HOSTS": ENV.django_allowed_hosts,
    "AFTERTOUCH_BASE_URL": ENV.aftertouch_base_url,
    "AFTERTOUCH_SECRETS_KEYS": ENV.aftertouch_secrets_keys,
}
_problems = [f"  {name}: must be set in production" for name, value in _required.items() if not value]
if ENV.aftertouch_time_scale != 1:
    _problems.append("  AFTERTOUCH_TIME_SCALE: must be 1 in production, it shortens every delay")
if any(len(key) < SHORTEST_KEY for key in AFTERTOUCH_SECRETS_KEYS):
    _problems.append(f"  AFTERTOUCH_SECRETS_KEYS: each needs {SHORTEST_KEY} characters or more, as random as they come")
if _problems:
    sys.exit("Aftertouch cannot start, these settings do not fit:\n" + "\n".join(_problems))

SECURE_SSL_REDIRECT = True
SECURE_PROXY_SSL_HEADER = ("HTTP_X_FORWARDED_PROTO", "https")
# Probes and scrapers come from inside, without TLS.
SECURE_REDIRECT_EXEMPT = [r"^health/", r"^metrics$"]
SECURE_HSTS_SECONDS = 31_536_000
SECURE_HSTS_INCLUDE_SUBDOMAINS = True
SECURE_HSTS_PRELOAD = True
SESSION_COOKIE_SECURE = True
CSRF_COOKIE_SECURE = True
