"""Read settings that must be refused."""

from __future__ import annotations

import pytest

from config.environment import environment


def refusal_of(**env: str) -> str:
    """Return the last words of a process that refuses these settings."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in env.items():
            patch.setenv(name, value)
        with pytest.raises(SystemExit) as refused:
            environment.__wrapped__()
    return str(refused.value.code)
