"""The kinds of isolation that this machine has."""

from __future__ import annotations

import os
import shutil

import pytest
from pytest_django import Settings

from rpa_tasks import isolation


@pytest.fixture(params=(isolation.NONE, isolation.UID, isolation.BUBBLEWRAP))
def kind(request: pytest.FixtureRequest, settings: Settings, monkeypatch: pytest.MonkeyPatch) -> str:
    """Isolate commands in this way. `parametrize(..., indirect=True)` chooses among the kinds."""
    if request.param == isolation.UID and os.geteuid() != 0:
        pytest.skip("only root can give commands a uid of their own")
    if request.param == isolation.BUBBLEWRAP:
        if not shutil.which("bwrap"):
            pytest.skip("missing service: bubblewrap")
        if os.geteuid() == 0:  # refused, because root is root inside; processes and directories are treated alike
            monkeypatch.setattr(isolation, "prove_isolation", lambda *_: "")
    settings.AFTERTOUCH_RPA_ISOLATION = request.param
    return str(request.param)
