"""Ports that are given out are not given out twice, though what is to listen there takes its time."""

from __future__ import annotations

import os
import subprocess
import sys

from config.environment import ROOT
from config.local.processes import is_port_free, reserve_port, select_port


def claim_in_other_process(port: int) -> bool:
    """By a process that ends thereafter."""
    code = f"from config.local.processes import reserve_port; raise SystemExit(not reserve_port({port}))"
    return subprocess.run([sys.executable, "-W", "error", "-c", code], cwd=ROOT, check=False).returncode == 0


def test_port_is_reserved_by_live_process() -> None:
    port = select_port()
    assert is_port_free(port), "nobody listens there yet"
    assert not reserve_port(port)
    assert not claim_in_other_process(port)
    assert select_port(port) == port, "its own server comes back to it"
    never_given = 100_000 + os.getpid()
    assert claim_in_other_process(never_given)
    assert claim_in_other_process(never_given)
