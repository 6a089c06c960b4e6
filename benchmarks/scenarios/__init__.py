"""List the scenarios in running order."""

from __future__ import annotations

from benchmarks.environment import Scenario
from benchmarks.scenarios.arrival import arrival
from benchmarks.scenarios.burst import burst
from benchmarks.scenarios.day import day
from benchmarks.scenarios.gateway import gateway
from benchmarks.scenarios.herd import herd
from benchmarks.scenarios.idle import idle
from benchmarks.scenarios.imports import imports
from benchmarks.scenarios.intake import intake
from benchmarks.scenarios.lateness import lateness
from benchmarks.scenarios.nodes import nodes
from benchmarks.scenarios.outbox import outbox
from benchmarks.scenarios.pick import pick
from benchmarks.scenarios.receivers import receivers
from benchmarks.scenarios.rpa import rpa
from benchmarks.scenarios.rules import rules
from benchmarks.scenarios.search import search
from benchmarks.scenarios.silence import silence
from benchmarks.scenarios.sockets import sockets
from benchmarks.scenarios.takeover import takeover
from benchmarks.scenarios.texts import texts
from benchmarks.scenarios.volume import volume
from benchmarks.scenarios.waiting import waiting
from benchmarks.scenarios.webhook import webhook
from benchmarks.scenarios.windows import windows

SCENARIOS: dict[str, Scenario] = {
    "lateness": lateness,
    "arrival": arrival,
    "burst": burst,
    "rules": rules,
    "texts": texts,
    "herd": herd,
    "webhook": webhook,
    "outbox": outbox,
    "nodes": nodes,
    "day": day,
    "receivers": receivers,
    "intake": intake,
    "imports": imports,
    "idle": idle,
    "waiting": waiting,
    "volume": volume,
    "search": search,
    "pick": pick,
    "windows": windows,
    "rpa": rpa,
    "takeover": takeover,
    "silence": silence,
    "sockets": sockets,
    "gateway": gateway,
}
