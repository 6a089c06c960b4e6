"""Flower without a login shows every task to anybody who reaches it, and lets them stop workers."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

LOGINS = ("--basic-auth", "--basic_auth", "--auth-provider", "--auth_provider", "--conf")
VARIABLES = ("FLOWER_BASIC_AUTH", "FLOWER_AUTH_PROVIDER", "FLOWER_CONF")


def insist(words: Sequence[str], environ: Mapping[str, str]) -> None:
    """Ends the process where it is to be a Flower with neither a login nor a file of settings that may name one."""
    program = Path(words[0])
    if "flower" not in words[1:] or "celery" not in (program.name, program.parent.name):
        return
    if any(word.startswith(LOGINS) for word in words) or any(environ.get(name) for name in VARIABLES):
        require_login_for_monitoring()
        return
    sys.exit("Flower needs a login: set FLOWER_BASIC_AUTH=user:password")


def require_login_for_monitoring() -> None:
    """Flower serves these two pages without its login, and the first names all workers and tasks."""
    from flower.views.monitor import Healthcheck, Metrics  # type: ignore[import-untyped,unused-ignore]
    from tornado.web import authenticated

    for view in (Metrics, Healthcheck):
        view.get = authenticated(view.get)
