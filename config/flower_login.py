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
        return
    sys.exit("Flower needs a login: set FLOWER_BASIC_AUTH=user:password")
