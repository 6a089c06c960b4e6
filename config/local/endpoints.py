"""Store the addresses, secrets and settings of this checkout's stack."""

from __future__ import annotations

import json
import os
import secrets as randomness
from collections.abc import MutableMapping
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Endpoints:
    database_url: str
    redis_url: str


def read_endpoints(state_dir: Path) -> Endpoints | None:
    """Return the addresses with their passwords, or None if no embedded server was started."""
    try:
        return Endpoints(**json.loads((state_dir / "endpoints.json").read_text()))
    except FileNotFoundError:
        return None


def write_private(path: Path, text: str) -> None:
    """Replace a file that only this account reads, atomically: a reader sees either the old or the new text."""
    draft = path.with_name(f"{path.name}.new")
    draft.touch(mode=0o600)
    draft.write_text(text)
    draft.replace(path)


#: A process that names one of these differently uses another stack.
IDENTIFYING = ("DATABASE_URL", "REDIS_URL", "CELERY_BROKER_URL", "DJANGO_SETTINGS_MODULE")


def stack_settings(state_dir: Path) -> Path:
    """Return the file with the settings of the running stack, for `adopt_stack_settings`. It holds secrets."""
    return state_dir / "settings.json"


def adopt_stack_settings(state_dir: Path, environ: MutableMapping[str, str]) -> None:
    """Add the settings of the running stack that `environ` lacks, unless `environ` names another stack.

    A stack of another account is none of this process.
    """
    try:
        given: dict[str, str] = json.loads(stack_settings(state_dir).read_text())
    except (FileNotFoundError, PermissionError):
        return
    if all(environ.get(name, given.get(name)) == given.get(name) for name in IDENTIFYING):
        for name, value in given.items():
            environ.setdefault(name, value)


def read_or_create_secret(state_dir: Path, name: str) -> str:
    """Return the secret of this name and create it once. Concurrent processes get the same one."""
    kept = state_dir / "secrets" / name
    kept.parent.mkdir(mode=0o700, exist_ok=True)
    if not kept.exists():
        draft = kept.with_name(f"{name}.{os.getpid()}")
        draft.touch(mode=0o600)
        draft.write_text(randomness.token_urlsafe(32))
        try:
            os.link(draft, kept)  # never replaces: the first process wins, and the file is always complete
        except FileExistsError:
            pass
        finally:
            draft.unlink()
    return kept.read_text()


class EmbeddedServerError(RuntimeError):
    """An embedded server cannot start, answer or stop. The text contains the remedy."""
