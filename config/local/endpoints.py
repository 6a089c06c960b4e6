"""Where the embedded servers of this checkout listen, while they run."""

from __future__ import annotations

import json
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
