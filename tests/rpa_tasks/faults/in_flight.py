"""Two jobs that run during a fault, and their required state afterwards."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from tests.rpa_tasks.faults.effect_log import Effect, find_overlaps
from tests.rpa_tasks.faults.rpa_cluster import Market, Node, RpaCluster

#: A supervisor has nearly all of its 30 s when renewals end; then the tests expire the leases.
QUICK = {"RENEW_INTERVAL": 0.5}


@dataclass
class InFlight:
    """An idempotent and another job that run, each with a daemon of its own, until `go` is there."""

    cluster: RpaCluster
    market: Market
    again: str
    once: str
    go: Path
    first: list[Effect]  #: their runs

    @property
    def tasks(self) -> tuple[str, str]:
        return self.again, self.once

    def commands(self) -> list[psutil.Process]:
        return [psutil.Process(effect.pid) for effect in self.first]

    def guards(self) -> list[psutil.Process]:
        found = [command.parent() for command in self.commands()]
        assert all(guard and "supervisor/main.py" in guard.cmdline()[3] for guard in found)
        return [guard for guard in found if guard]

    def runners(self, node: Node) -> list[psutil.Process]:
        parents = {guard.ppid() for guard in self.guards()}
        return [child for child in node.children() if child.pid in parents]

    def lease_is_over(self) -> None:
        """The commands have ended by then, as they would have before a minute is over."""
        self.cluster.await_end_of_commands(*self.tasks)
        self.go.touch()
        self.cluster.expire_leases(*self.tasks)


def start_jobs(cluster: RpaCluster, **payload: Any) -> InFlight:
    market = cluster.market(2, again={"idempotent": True}, once={})
    go = market.folder / "go"
    payload = {"until": str(go), "brood": True, **payload}
    again = market.publish(market.shops[0], "again", payload=payload)
    once = market.publish(market.shops[1], "once", payload=payload)
    first = cluster.await_effects(market.log, [again, once])
    return InFlight(cluster, market, again, once, go, first)


def check_recovery(struck: InFlight, reason: str, report_line: Callable[[str], None], name: str) -> None:
    """The one ran again under its key and ended well. The other has its one effect, and a person decides."""
    cluster, market = struck.cluster, struck.market
    struck_at = time.monotonic()
    cluster.await_state(struck.again, "succeeded", "failed", "unknown")
    cluster.await_state(struck.once, "succeeded", "failed", "unknown")
    again, once = cluster.job(struck.again), cluster.job(struck.once)
    first, second = market.log.of(struck.again)
    assert (again["state"], again["failures"]) == ("succeeded", 1)
    assert [run["reason"] for run in cluster.runs(struck.again)] == [reason, ""]
    assert first.key == second.key == struck.again
    assert (first.ended, second.lease > first.lease) == (None, True)
    assert second.ended is not None
    assert (once["state"], once["reason"], once["settled_at"] is None) == ("unknown", reason, False)
    assert len(market.log.of(struck.once)) == 1
    assert [failed["failure"] for failed in cluster.failed_tasks(struck.once)] == ["unknown"]
    assert not cluster.failed_tasks(struck.again)
    after = [market.publish(shop, "once") for shop in market.shops]
    for task in after:
        assert cluster.await_state(task, "succeeded", "unknown")["state"] == "succeeded"
    assert not find_overlaps(market.log.effects())
    cluster.await_end_of_commands(*struck.tasks)
    report_line(
        f"{name} · idempotent: {reason}, run again under the same key, lease {first.lease} → {second.lease}; "
        f"the other: unknown, 1 effect, 1 failed task; whole again after {time.monotonic() - struck_at:.1f} s"
    )
