"""Housekeeping of a node that needs PostgreSQL.

It reports the node, chooses the shops whose browsers start next, ends orphaned runs and lost take-overs, and deletes
old evidence, logs, directories, profiles and nodes. Each step is bounded, because the node must report between the
passes.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from datetime import datetime, timedelta
from itertools import chain, islice
from pathlib import Path
from uuid import UUID

import structlog
from django.conf import settings
from django.db import DatabaseError, InterfaceError, close_old_connections, connection
from django.db.models.functions import Now
from django.utils.timezone import now

from rpa_tasks import isolation
from rpa_tasks.browser_settings import resolve_launch_settings
from rpa_tasks.browsers import registry, upkeep
from rpa_tasks.browsers.browser_processes import processes_on_profile
from rpa_tasks.browsers.launch import NoBrowser
from rpa_tasks.browsers.registry import UNNEEDED_MARK, Lock
from rpa_tasks.browsers.upkeep import WarmShop
from rpa_tasks.jobs.ledger import job_ledger
from rpa_tasks.jobs.nodes import is_draining
from rpa_tasks.models import ExecutionNode, Job, JobState, LoginState, Shop
from rpa_tasks.supervisor.runs import LEASE_NO, SHOP, TASK_ID, end_marked_processes, list_run_processes
from rpa_tasks.takeover import leases
from rpa_tasks.worker import node
from rpa_tasks.worker.node import claim_node_name
from scheduling import sql

log = structlog.get_logger(__name__)


HORIZON = timedelta(hours=1)  #: a browser that is needed later would be idle for too long
LOOKED_AT = 200  #: shops; some may have no browser of the pool


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


# Delete browser profiles and homes that their node no longer needs.
#
# The shop is retired, deleted or pinned to another node, and for `KEPT_FOR` no run used its home here. Reads the
# database; the pool itself does not.


#: A shop that was retired by mistake, or moved for weeks, finds its login again. Few logins last longer.
KEPT_FOR = timedelta(days=30)
SCAN_INTERVAL = 600.0  #: seconds


class OldProfiles:
    def __init__(self) -> None:
        self._looked_at: float | None = None

    def delete_one(self) -> bool:
        """Delete one old profile per pass, for at most `isolation.DELETE_FOR` seconds.

        Returns whether the next pass continues. If no old profile is left, the next look follows after `SCAN_INTERVAL`.
        """
        if self._looked_at is not None and time.monotonic() - self._looked_at < SCAN_INTERVAL:
            return False
        at, ends_at = sql.now(), time.monotonic() + isolation.DELETE_FOR
        for folder in _unneeded_profiles():
            try:
                if _is_old(folder, at) and (_delete_profile(folder, at, ends_at) or time.monotonic() >= ends_at):
                    return True
            except OSError as error:  # a full disk, or a directory or a link that its browser put in place of a file
                log.warning("profile_not_deleted", profile=folder.name, error=str(error))
        self._looked_at = time.monotonic()
        return False


def _unneeded_profiles() -> list[Path]:
    """Return directories of profiles, including those that only have a home."""
    needed = _needed_profiles()
    found = []
    homes = {name.removeprefix(".") for name in os.listdir(registry.homes_dir())}
    for name in sorted({*os.listdir(registry.profiles_dir()), *homes}):
        folder = registry.profiles_dir() / name
        try:
            if name in needed:
                (folder / UNNEEDED_MARK).unlink(missing_ok=True)
                continue
            if has_home := any(path.is_dir() for path in _home_paths(name)):
                with suppress(OSError):
                    folder.mkdir(mode=0o700, exist_ok=True)
            if has_home or (folder.is_dir() and set(os.listdir(folder)) - {registry.LOCK}):
                found.append(folder)
        except OSError as error:  # its browser can put a directory in the mark's place
            log.warning("profile_not_read", profile=name, error=str(error))
    return found


def _needed_profiles() -> set[str]:
    """Return the directory names of profiles that this node may serve.

    These are profiles of shops without a preferred node, or whose node has not reported for `KEPT_FOR`. That may be
    this node under a former name.
    """
    others = ExecutionNode.objects.filter(seen_at__gt=Now() - KEPT_FOR).exclude(name=settings.AFTERTOUCH_NODE)
    shops = Shop.objects.filter(retired_at=None, platform__retired_at=None).exclude(
        lane__home__in=others.values("name")
    )
    return {registry.directory_name(shop.profile) for shop in shops.select_related("platform")}


def _home_paths(name: str) -> tuple[Path, Path]:
    """Return the home of a profile's directory name, and where its deletion sets it aside. No name has a dot first."""
    return registry.homes_dir() / name, registry.homes_dir() / f".{name}"


def _is_old(folder: Path, at: datetime) -> bool:
    """Return whether this node has known for `KEPT_FOR` that the profile is not needed. The first look notes it.

    Raises: `OSError`.
    """
    try:
        return at - datetime.fromisoformat(registry.read_own(folder / UNNEEDED_MARK).decode()) > KEPT_FOR
    except (OSError, ValueError, TypeError):  # its browser can write the file
        registry.write_own(folder / UNNEEDED_MARK, at.isoformat())
        return False


def _delete_profile(folder: Path, at: datetime, ends_at: float) -> bool:
    """Delete the profile with the shop's home, except its lock file.

    Without that file two later processes could hold different locks: the old file and a new one. Raises `OSError`.
    """
    lock = Lock(folder / registry.LOCK)
    if not lock.try_acquire():
        return False
    try:
        # The shop may have returned to this node since the look.
        if folder.name in _needed_profiles() or _is_in_use(folder):
            return False
        home, aside = _home_paths(folder.name)
        if not isolation.delete_directory(aside, ends_at - time.monotonic()):
            return False  # the rest of an interrupted deletion
        with registry.homes_lock():
            if not _is_old(folder, at):  # a run has taken the home since
                return False
            with suppress(FileNotFoundError):
                home.rename(aside)  # a run that starts from now on gets a new one
        names = set(os.listdir(folder)) - {registry.LOCK, UNNEEDED_MARK}
        for path in (aside, *(folder / name for name in names)):
            if not isolation.delete_directory(path, ends_at - time.monotonic()):
                return False
        with suppress(OSError):  # not empty: a run begins
            registry.shop_runs_path(folder.name).rmdir()
        # Last, so that an interrupted deletion starts again. A run may have removed it.
        (folder / UNNEEDED_MARK).unlink(missing_ok=True)
    finally:
        lock.release()
    log.info("profile_deleted", profile=folder.name)
    return True


def _is_in_use(folder: Path) -> bool:
    """Return whether a browser has the profile, including an idle one or that of a person, or a command its home."""
    records = registry.read_records().values()
    if any(record and record.profile and registry.directory_name(record.profile) == folder.name for record in records):
        return True
    if any(True for _ in processes_on_profile(str(folder))):
        return True
    names = {each.markers[SHOP] for each in list_run_processes()}
    shops = Shop.objects.select_related("platform").filter(shop_id__in=[name.partition("/")[2] for name in names])
    return any(
        f"{shop.platform.key}/{shop.shop_id}" in names and registry.directory_name(shop.profile) == folder.name
        for shop in shops
    )


ORPHANED_FOR = 30.0  #: seconds; the supervisor process, which ends a run more gently, has finished by then
BATCH = 200  #: evidence rows per pass: each may have a megabyte, and the node does not report during the deletion
TIDY_EVERY = 600.0  #: seconds
ENTRIES_AT_ONCE = 500  #: log files or directories read in one pass
RUN_LOG_KEPT = timedelta(days=1)  #: since its last write; the process that settles a run deletes its log
BROWSER_LOG = 1_000_000  #: bytes of a browser's standard error before the log is truncated

RunId = tuple[UUID, int]  #: task id and lease number


class Housekeeping:
    def __init__(self, queues: list[str], prewarmer: upkeep.Prewarmer | None = None) -> None:
        self.queues = queues
        self.prewarmer = prewarmer or upkeep.Prewarmer()
        self.started_at: datetime = now()
        self._orphaned_since: dict[RunId, float] = {}
        self._tidied_at: float | None = None
        self._runs = Walk(
            lambda: (run for shop in _scan_directory(registry.runs_dir()) for run in _scan_directory(Path(shop)))
        )
        self._left_runs: list[str] = []
        self._logs = Walk(lambda: _scan_directory(registry.browser_logs_dir()))
        self._old_profiles = OldProfiles()

    @property
    def steps(self) -> list[Callable[[], object]]:
        """List the steps of one pass in order."""
        return [
            self.report,
            self.choose_next_shops,
            self.end_orphans,
            leases.end_lost_take_overs,
            self.delete_left_runs,
            self.tidy,
            self.delete_old_logs,
            self._old_profiles.delete_one,
        ]

    def is_database_available(self) -> bool:
        """Return whether PostgreSQL is available."""
        try:
            close_old_connections()
            connection.ensure_connection()
        except (DatabaseError, InterfaceError) as error:
            log.warning("database_unavailable", error=str(error))
            return False
        return True

    def report(self) -> None:
        """Report this node with PostgreSQL's time, which the lanes use for comparison. A drain stays."""
        if not claim_node_name():
            log.error("node_name_taken", name=settings.AFTERTOUCH_NODE, remedy="give each node its own AFTERTOUCH_NODE")
            return
        ExecutionNode.objects.update_or_create(
            name=settings.AFTERTOUCH_NODE,
            defaults={
                "seen_at": Now(),
                "started_at": self.started_at,
                "slots": node.count_slots(),
                "queues": self._list_queues(),
                "browsers": upkeep.describe_slots(),
            },
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
        found = {run for each in list_run_processes() if (run := _run_of_marks(each.markers))}
        orphans = found - _running_runs(found)
        at = time.monotonic()
        self._orphaned_since = {run: self._orphaned_since.get(run, at) for run in orphans}
        doomed = {run for run, since in self._orphaned_since.items() if at - since >= ORPHANED_FOR}
        if doomed:
            log.warning("orphans_ended", runs=[f"{task_id}/{lease_no}" for task_id, lease_no in doomed])
            end_marked_processes(lambda marks: _run_of_marks(marks) in doomed)

    def delete_left_runs(self) -> None:
        """Delete working directories, with parameter files, of runs whose worker was killed.

        Takes at most `isolation.DELETE_FOR`. The next pass continues.
        """
        ends_at = time.monotonic() + isolation.DELETE_FOR
        if not self._left_runs:
            entries = self._runs.next_entries()
            # A running job of any shop may have the directory: its profile may have changed since.
            leases = {int(entry.name) for entry in entries if re.fullmatch(r"[0-9]{1,9}", entry.name)}
            running = Job.objects.filter(state=JobState.RUNNING, lease_no__in=leases)
            kept = {str(lease_no) for lease_no in running.values_list("lease_no", flat=True)}
            self._left_runs = [entry.path for entry in entries if entry.name not in kept]
        while self._left_runs and (within := ends_at - time.monotonic()) > 0:
            isolation.delete_directory(Path(self._left_runs.pop()), within)

    def delete_old_logs(self) -> int:
        """Delete logs of finished runs, truncate or delete those of browsers. Returns the number of files read."""
        entries = self._logs.next_entries()
        old: dict[os.DirEntry[str], RunId | None] = {}
        for entry in entries:
            with suppress(OSError):
                age = timedelta(seconds=time.time() - entry.stat().st_mtime)
                if not entry.name.startswith("browser-"):
                    if age > RUN_LOG_KEPT:
                        task_id, _, lease_no = entry.name.removesuffix(".log").rpartition("-")
                        old[entry] = _run_of_marks({TASK_ID: task_id, LEASE_NO: lease_no})
                elif age > settings.AFTERTOUCH_RPA_EVIDENCE_KEPT:
                    os.unlink(entry)
                elif entry.stat().st_size > BROWSER_LOG:
                    os.truncate(entry, 0)
        # Age is not enough: a run may print nothing for days.
        running = _running_runs({run for run in old.values() if run})
        for entry, run in old.items():
            if run not in running:
                with suppress(OSError):
                    os.unlink(entry)
        return len(entries)

    def tidy(self) -> None:
        if self._tidied_at is not None and time.monotonic() - self._tidied_at < TIDY_EVERY:
            return
        if delete_old_evidence() < BATCH:  # otherwise the next pass deletes more
            delete_old_nodes()
            self._tidied_at = time.monotonic()


def delete_old_nodes() -> None:
    """Delete nodes without a recent report. A node that comes back reports itself again.

    A draining node stays: otherwise it would take jobs when it comes back.
    """
    ExecutionNode.objects.filter(seen_at__lt=Now() - KEPT_FOR, draining_at=None).delete()


def delete_old_evidence() -> int:
    """Delete one batch of old evidence and return its size. Rows that another node is deleting are skipped."""
    return sql.execute(
        """
        DELETE FROM rpa_tasks_evidence WHERE id = ANY(ARRAY(
            SELECT id FROM rpa_tasks_evidence WHERE created_at < statement_timestamp() - %(kept)s
            ORDER BY created_at LIMIT %(batch)s FOR UPDATE SKIP LOCKED
        ))
        """,
        {"kept": settings.AFTERTOUCH_RPA_EVIDENCE_KEPT, "batch": BATCH},
    )


class Walk:
    """Read the entries of folders in bounded steps, again and again: killed workers may leave very many."""

    def __init__(self, scan: Callable[[], Iterator[os.DirEntry[str]]]) -> None:
        self._scan = scan
        self._rest = scan()

    def next_entries(self) -> list[os.DirEntry[str]]:
        entries = list(islice(self._rest, ENTRIES_AT_ONCE))
        if len(entries) < ENTRIES_AT_ONCE:
            self._rest = self._scan()
        return entries


def _scan_directory(folder: Path) -> Iterator[os.DirEntry[str]]:
    with os.scandir(folder) as entries:
        yield from entries


def _run_of_marks(marks: Mapping[str, str]) -> RunId | None:
    try:
        return UUID(marks[TASK_ID]), int(marks[LEASE_NO])
    except (KeyError, ValueError):
        return None


def _running_runs(runs: set[RunId]) -> set[RunId]:
    jobs = Job.objects.filter(state=JobState.RUNNING, task_id__in={task_id for task_id, _ in runs})
    return set(jobs.values_list("task_id", "lease_no")) if runs else set()
