"""Passwords of this checkout: made once, kept in the state directory, readable by its owner only."""

from __future__ import annotations

import os
import secrets as randomness
from pathlib import Path


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
