"""Production settings. Addresses and secrets are required and have no defaults."""

from __future__ import annotations

import ctypes
import secrets
import sys

from config.settings.base import *  # noqa: F403
from config.settings.base import AFTERTOUCH_ROLE, AFTERTOUCH_RPA_SECRETS_KEYS, AFTERTOUCH_SECRETS_KEYS, ENV

AFTERTOUCH_RPA_ISOLATION_REQUIRED = True

SHORTEST_SECRET_KEY = 50  #: characters, at least 5 different ones, as Django's `check --deploy` requires
#: Characters of 32 random bytes in base64. An attacker with a copy of the database can guess without limit.
SHORTEST_KEY = 43
SHORTEST_OLD_KEY = 32  #: for a key that only decrypts, so that a short key can be rotated out

_required = {
    "DATABASE_URL": ENV.database_url,
    "REDIS_URL": ENV.redis_url,
    "DJANGO_SECRET_KEY": ENV.django_secret_key.get_secret_value(),
    "DJANGO_ALLOWED_HOSTS": ENV.django_allowed_hosts,
    "AFTERTOUCH_BASE_URL": ENV.aftertouch_base_url,
    "AFTERTOUCH_SECRETS_KEYS": ENV.aftertouch_secrets_keys,
}
if AFTERTOUCH_ROLE == "execution":
    _unwanted = [name for name in ("DJANGO_SECRET_KEY", "AFTERTOUCH_SECRETS_KEYS") if _required[name]]
    _required = {name: _required[name] for name in ("DATABASE_URL", "REDIS_URL")}
    # Django requires a key. This one signs nothing for other processes and decrypts no stored secret.
    SECRET_KEY = secrets.token_urlsafe(64)
else:
    _unwanted = []
_problems = [f"  {name}: must be set in production" for name, value in _required.items() if not value]
_problems += [f"  {name}: must not be set where AFTERTOUCH_ROLE is execution" for name in _unwanted]
if ENV.aftertouch_time_scale != 1:
    _problems.append("  AFTERTOUCH_TIME_SCALE: must be 1 in production, it shortens every delay")
if ENV.aftertouch_oidc_issuer and not ENV.aftertouch_oidc_issuer.startswith("https://"):
    _problems.append("  AFTERTOUCH_OIDC_ISSUER: must start with https:// in production")
_secret_key = ENV.django_secret_key.get_secret_value()
if _secret_key and (len(_secret_key) < SHORTEST_SECRET_KEY or len(set(_secret_key)) < 5):
    _problems.append(
        f"  DJANGO_SECRET_KEY: must have {SHORTEST_SECRET_KEY} random characters or more; "
        "`openssl rand -base64 48` makes one"
    )
for _name, _keys in (
    ("AFTERTOUCH_SECRETS_KEYS", AFTERTOUCH_SECRETS_KEYS),
    ("AFTERTOUCH_RPA_SECRETS_KEYS", AFTERTOUCH_RPA_SECRETS_KEYS),
):
    if _keys and len(_keys[0]) < SHORTEST_KEY:
        _problems.append(
            f"  {_name}: the first must have {SHORTEST_KEY} random characters or more; "
            "`openssl rand -base64 32` makes one"
        )
    if any(len(key) < SHORTEST_OLD_KEY or len(set(key)) < 5 for key in _keys):
        _problems.append(f"  {_name}: each must have {SHORTEST_OLD_KEY} random characters or more")
if _problems:
    sys.exit("Aftertouch cannot start. Invalid settings:\n" + "\n".join(_problems))

# Without isolation, commands of flows run as this user and could inspect this process. Forked children inherit this.
PR_SET_DUMPABLE = 4
if ctypes.CDLL(None).prctl(PR_SET_DUMPABLE, 0, 0, 0, 0) != 0:
    sys.exit("Aftertouch cannot start: the kernel lets other processes inspect this one (prctl PR_SET_DUMPABLE)")

SECURE_SSL_REDIRECT = True
SECURE_PROXY_SSL_HEADER = ("HTTP_X_FORWARDED_PROTO", "https")
# Probes and scrapers connect internally, without TLS.
SECURE_REDIRECT_EXEMPT = [r"^health/", r"^metrics$"]
SECURE_HSTS_SECONDS = 31_536_000
SECURE_HSTS_INCLUDE_SUBDOMAINS = True
SECURE_HSTS_PRELOAD = True
SESSION_COOKIE_SECURE = True
CSRF_COOKIE_SECURE = True
