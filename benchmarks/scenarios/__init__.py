"""List the scenarios in running order."""

from __future__ import annotations

from benchmarks.environment import Scenario
from benchmarks.scenarios.burst import burst
from benchmarks.scenarios.herd import herd
from benchmarks.scenarios.idle import idle
from benchmarks.scenarios.intake import intake
from benchmarks.scenarios.lateness import lateness
from benchmarks.scenarios.nodes import nodes
from benchmarks.scenarios.pick import pick
from benchmarks.scenarios.receivers import receivers
from benchmarks.scenarios.rpa import rpa
from benchmarks.scenarios.silence import silence
from benchmarks.scenarios.sockets import sockets
from benchmarks.scenarios.waiting import waiting
from benchmarks.scenarios.webhook import webhook

SCENARIOS: dict[str, Scenario] = {
    "lateness": lateness,
    "burst": burst,
    "herd": herd,
    "webhook": webhook,
    "nodes": nodes,
    "receivers": receivers,
    "intake": intake,
    "idle": idle,
    "waiting": waiting,
    "pick": pick,
    "rpa": rpa,
    "silence": silence,
    "sockets": sockets,
}
