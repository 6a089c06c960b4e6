"""Housekeeping of a node that needs PostgreSQL: report it, choose the shops whose browsers start next, end orphans.

Each step is short, because a node that does not report loses its shops. `cleaning` has the long ones.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime, timedelta
from itertools import chain

import structlog
from django.conf import settings
from django.utils.timezone import now

from rpa_tasks.browser_settings import resolve_launch_settings
from rpa_tasks.browsers import upkeep
from rpa_tasks.browsers.launch import NoBrowser
from rpa_tasks.browsers.upkeep import WarmShop
from rpa_tasks.jobs.ledger import job_ledger
from rpa_tasks.jobs.nodes import is_draining
from rpa_tasks.maintainer.cleaning import running_runs
from rpa_tasks.models import ExecutionNode, LoginState, Shop
from rpa_tasks.supervisor.runs import LEASE_NO, TASK_ID, end_marked_processes, list_run_processes
from rpa_tasks.takeover import leases
from rpa_tasks.worker import node
from rpa_tasks.worker.node import claim_node_name

log = structlog.get_logger(__name__)

HORIZON = timedelta(hours=1)  #: a browser that is needed later would be idle for too long
LOOKED_AT = 200  #: shops; some may have no browser of the pool
ORPHANED_FOR = 30.0  #: seconds; the supervisor process, which ends a run more gently, has finished by then


def find_next_shops(queues: Sequence[str]) -> list[WarmShop]:
    """Return shops whose next job this node may run, the earliest first, then those that it served last.

    At most `AFTERTOUCH_RPA_WARM_BROWSERS`. A shop with a running job has its browser.
    """
    node, most = settings.AFTERTOUCH_NODE, settings.AFTERTOUCH_RPA_WARM_BROWSERS
    if not most:
        return []
    needed = job_ledger.next_shops(queues, node=node, within=HORIZON, most=LOOKED_AT)
    shops = Shop.objects.select_related("platform")
    by_id = shops.in_bulk(needed)
    idle = shops.filter(
        paused=False, retired_at=None, login_state=LoginState.OK, lane__task_id=None, lane__home=node,
        platform__paused=False, platform__retired_at=None, platform__breaker__open_until=None,
    )  # fmt: skip
    served = idle.order_by("-lane__last_served_at")[: settings.AFTERTOUCH_RPA_BROWSERS]
    found: dict[int, WarmShop] = {}
    for shop in chain((by_id[pk] for pk in needed if pk in by_id), served):
        if len(found) >= most:
            break
        try:
            launch = resolve_launch_settings(shop)
        except NoBrowser:  # its run names the reason
            continue
        if not launch.cdp_url:  # to attach one closes its pages, and a run on another node may have begun
            found[shop.pk] = WarmShop(shop.profile, f"{shop.platform.key}/{shop.shop_id}", launch)
    return list(found.values())


class Housekeeping:
    def __init__(self, queues: list[str], prewarmer: upkeep.Prewarmer | None = None) -> None:
        self.queues = queues
        self.prewarmer = prewarmer or upkeep.Prewarmer()
        self.started_at: datetime = now()
        self._orphaned_since: dict[tuple[str, str], float] = {}  #: by task id and lease number

    @property
    def steps(self) -> list[Callable[[], object]]:
        """List the steps of one pass in order."""
        return [self.report, self.choose_next_shops, self.end_orphans, leases.end_lost_take_overs]

    def report(self) -> None:
        """Report this node with PostgreSQL's time, which the lanes use for comparison. A drain stays."""
        if not claim_node_name():
            log.error("node_name_taken", name=settings.AFTERTOUCH_NODE, remedy="give each node its own AFTERTOUCH_NODE")
            return
        ExecutionNode.objects.filter(name=settings.AFTERTOUCH_NODE).update(
            started_at=self.started_at,
            slots=node.count_slots(),
            queues=self._list_queues(),
            browsers=upkeep.describe_slots(),
        )

    def _list_queues(self) -> list[str]:
        """Return the queues of all workers of the node, because only one of their maintainers is active."""
        return list(dict.fromkeys([*self.queues, *node.served_queues()]))

    def choose_next_shops(self) -> None:
        self.prewarmer.wanted = [] if is_draining(settings.AFTERTOUCH_NODE) else find_next_shops(self._list_queues())

    def end_orphans(self) -> None:
        """End processes of finished runs whose supervisor process hangs.

        For killed supervisor processes see `rpa_tasks.supervisor.runs.end_unsupervised`.
        """
        found = {_run_of(each.markers) for each in list_run_processes()}
        orphans = found and found - running_runs()
        at = time.monotonic()
        self._orphaned_since = {run: self._orphaned_since.get(run, at) for run in orphans}
        doomed = {run for run, since in self._orphaned_since.items() if at - since >= ORPHANED_FOR}
        if doomed:
            log.warning("orphans_ended", runs=[f"{task_id}/{lease_no}" for task_id, lease_no in doomed])
            end_marked_processes(lambda marks: _run_of(marks) in doomed)


def _run_of(marks: Mapping[str, str]) -> tuple[str, str]:
    return marks[TASK_ID], marks[LEASE_NO]
