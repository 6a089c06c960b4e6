"""Ports that are given out are not given out twice, though what is to listen there takes its time."""

from __future__ import annotations

import os
import subprocess
import sys

from config.environment import ROOT
from config.local.processes import is_port_free, reserve_port, select_port


def claimed_elsewhere(port: int) -> bool:
    """By a process that ends thereafter."""
    code = f"from config.local.processes import reserve_port; raise SystemExit(not reserve_port({port}))"
    return subprocess.run([sys.executable, "-W", "error", "-c", code], cwd=ROOT, check=False).returncode == 0


def test_a_port_is_given_to_one_process_until_that_ends() -> None:
    port = select_port()
    assert is_port_free(port), "nobody listens there yet"
    assert not reserve_port(port)
    assert not claimed_elsewhere(port)
    assert select_port(port) == port, "its own server comes back to it"
    never_given = 100_000 + os.getpid()
    assert claimed_elsewhere(never_given)
    assert claimed_elsewhere(never_given)
