"""With and without the sandbox."""

from __future__ import annotations

import shutil

import pytest

from rpa_tasks import isolation


@pytest.fixture(params=(isolation.NONE, isolation.BUBBLEWRAP))
def kind(request, settings) -> str:
    """Isolate commands in this way. `parametrize(..., indirect=True)` chooses one."""
    if request.param == isolation.BUBBLEWRAP and not shutil.which("bwrap"):
        pytest.skip("missing service: bubblewrap")
    settings.AFTERTOUCH_RPA_ISOLATION = request.param
    return str(request.param)
