"""Where the embedded servers of this checkout listen, while they run."""

from __future__ import annotations

import json
import os
import secrets as randomness
from dataclasses import asdict, dataclass
from pathlib import Path


@dataclass(frozen=True)
class Endpoints:
    database_url: str
    redis_url: str


def read_endpoints(state_dir: Path) -> Endpoints | None:
    """The addresses with their passwords, or None where no embedded server has been started."""
    try:
        return Endpoints(**json.loads((state_dir / "endpoints.json").read_text()))
    except FileNotFoundError:
        return None


def write_endpoints(state_dir: Path, endpoints: Endpoints) -> None:
    """Replace the file whole: a reader sees the old addresses or the new ones, never half a file."""
    draft = state_dir / "endpoints.json.new"
    draft.touch(mode=0o600)
    draft.write_text(json.dumps(asdict(endpoints)))
    draft.replace(state_dir / "endpoints.json")


def secret(state_dir: Path, name: str) -> str:
    """The secret of this name. Two processes that make it at once agree on one."""
    kept = state_dir / "secrets" / name
    kept.parent.mkdir(mode=0o700, exist_ok=True)
    if not kept.exists():
        draft = kept.with_name(f"{name}.{os.getpid()}")
        draft.touch(mode=0o600)
        draft.write_text(randomness.token_urlsafe(32))
        try:
            os.link(draft, kept)  # refuses to replace: the first one wins, and is never seen half written
        except FileExistsError:
            pass
        finally:
            draft.unlink()
    return kept.read_text()


class EmbeddedServerError(RuntimeError):
    """An embedded server cannot be started, reached or stopped; the text says what to do."""


class PasswordRefusedError(EmbeddedServerError):
    """A server in our place does not know our password: it belongs to a state directory that was removed."""
