"""Delete what a node no longer needs: working directories, logs, evidence, nodes, profiles and homes.

A thread of its own does it, so that neither many files nor a full directory delays the report of the node. Each step
starts from the disk and PostgreSQL again, and keeps nothing between passes.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import suppress
from datetime import datetime, timedelta
from pathlib import Path

import structlog
from django.conf import settings
from django.db.models.functions import Now

from rpa_tasks import isolation
from rpa_tasks.browsers import registry
from rpa_tasks.browsers.browser_processes import leftover_browsers_on, processes_on_profile
from rpa_tasks.browsers.registry import UNNEEDED_MARK, Lock
from rpa_tasks.models import ExecutionNode, Job, JobState, Shop
from rpa_tasks.supervisor.processes import end_processes
from rpa_tasks.supervisor.runs import SHOP, list_run_processes
from scheduling import sql

log = structlog.get_logger(__name__)

#: A shop that was retired by mistake, or moved for weeks, finds its login again. Few logins last longer.
KEPT_FOR = timedelta(days=30)
BATCH = 200  #: evidence rows in one statement: each may have a megabyte
RUN_LOG_KEPT = timedelta(days=1)  #: since its last write; the process that settles a run deletes its log
BROWSER_LOG = 1_000_000  #: bytes of a browser's standard error before the log is truncated


def running_runs() -> set[tuple[str, str]]:
    """Return task id and lease number of each run that PostgreSQL knows as running, on any node."""
    running = Job.objects.filter(state=JobState.RUNNING).values_list("task_id", "lease_no")
    return {(str(task_id), str(lease_no)) for task_id, lease_no in running}


def delete_left_runs() -> None:
    """Delete working directories, with parameter files, of runs whose worker was killed."""
    folders: list[Path] = []
    for shop in registry.runs_dir().iterdir():
        try:
            folders += shop.iterdir()
        except OSError as error:  # programs of the shop may have closed it
            log.warning("runs_not_read", folder=str(shop), error=str(error))
    # Read after the directories: a run that begins now has none of them. A running job of any shop may have one: its
    # profile may have changed since.
    kept = {lease_no for _, lease_no in running_runs()} if folders else set()
    for folder in folders:
        if folder.name not in kept:
            isolation.delete_directory(folder)


def delete_old_logs() -> None:
    """Delete logs of finished runs, truncate or delete those of browsers."""
    logs = list(registry.browser_logs_dir().iterdir())
    running = {f"{task_id}-{lease_no}.log" for task_id, lease_no in running_runs()}
    for path in logs:
        with suppress(OSError):
            found = path.stat()
            age = timedelta(seconds=time.time() - found.st_mtime)
            if path.name.startswith("browser-"):
                if age > settings.AFTERTOUCH_RPA_EVIDENCE_KEPT:
                    path.unlink()
                elif found.st_size > BROWSER_LOG:
                    os.truncate(path, 0)
            elif age > RUN_LOG_KEPT and path.name not in running:  # a run may print nothing for days
                path.unlink()


def delete_old_nodes() -> None:
    """Delete nodes without a recent report. A node that comes back reports itself again.

    A draining node stays: otherwise it would take jobs when it comes back.
    """
    ExecutionNode.objects.filter(seen_at__lt=Now() - KEPT_FOR, draining_at=None).delete()


def delete_old_evidence() -> int:
    """Delete old evidence in batches and return the number of rows. Rows that another node is deleting are skipped."""
    deleted = 0
    while count := sql.execute(
        """
        DELETE FROM rpa_tasks_evidence WHERE id = ANY(ARRAY(
            SELECT id FROM rpa_tasks_evidence WHERE created_at < statement_timestamp() - %(kept)s
            ORDER BY created_at LIMIT %(batch)s FOR UPDATE SKIP LOCKED
        ))
        """,
        {"kept": settings.AFTERTOUCH_RPA_EVIDENCE_KEPT, "batch": BATCH},
    ):
        deleted += count
    return deleted


# --- profiles and homes -------------------------------------------------------------------------------------------


def delete_old_profiles() -> None:
    """Delete browser profiles and homes that this node no longer needs.

    The shop is retired, deleted or pinned to another node, and for `KEPT_FOR` no run used its home here.
    """
    at = sql.now()
    for folder in _unneeded_profiles():
        try:
            if _is_old(folder, at):
                _delete_profile(folder, at)
        except OSError as error:  # a full disk, or a directory or a link that its browser put in place of a file
            log.warning("profile_not_deleted", profile=folder.name, error=str(error))


def _unneeded_profiles() -> Iterator[Path]:
    """Yield directories of profiles, including those that only have a home."""
    needed = _needed_profiles()
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
                yield folder
        except OSError as error:  # its browser can put a directory in the mark's place
            log.warning("profile_not_read", profile=name, error=str(error))


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


def _delete_profile(folder: Path, at: datetime) -> None:
    """Delete the profile with the shop's home, except its lock file.

    Without that file two later processes could hold different locks: the old file and a new one. Raises `OSError`.
    """
    lock = Lock(folder / registry.LOCK)
    if not lock.try_acquire():
        return
    try:
        # The shop may have returned to this node since the look. A recorded browser may be an idle one.
        kept, records = _needed_profiles(), registry.read_records().values()
        kept |= {registry.directory_name(each.profile) for each in records if each and each.profile}
        if folder.name in kept:
            return
        # Browsers of ours without a record: no other process would end them, as the shop starts none here.
        end_processes(lambda: leftover_browsers_on(str(folder)), grace=2.0)
        if _is_in_use(folder):
            return
        home, aside = _home_paths(folder.name)
        if not isolation.delete_directory(aside):
            return  # the rest of an interrupted deletion
        with registry.homes_lock():
            if not _is_old(folder, at):  # a run has taken the home since
                return
            with suppress(FileNotFoundError):
                home.rename(aside)  # a run that starts from now on gets a new one
        names = set(os.listdir(folder)) - {registry.LOCK, UNNEEDED_MARK}
        for path in (aside, *(folder / name for name in names)):
            if not isolation.delete_directory(path):
                return
        with suppress(OSError):  # not empty: a run begins
            registry.shop_runs_path(folder.name).rmdir()
        # Last, so that an interrupted deletion starts again. A run may have removed it.
        (folder / UNNEEDED_MARK).unlink(missing_ok=True)
    finally:
        lock.release()
    log.info("profile_deleted", profile=folder.name)


def _is_in_use(folder: Path) -> bool:
    """Return whether a browser has the profile, maybe that of a person, or a command its home."""
    if any(True for _ in processes_on_profile(str(folder))):
        return True
    names = {each.markers[SHOP] for each in list_run_processes()}
    shops = Shop.objects.select_related("platform").filter(shop_id__in=[name.partition("/")[2] for name in names])
    return any(
        f"{shop.platform.key}/{shop.shop_id}" in names and registry.directory_name(shop.profile) == folder.name
        for shop in shops
    )


#: One that frees no space is last.
STEPS = (delete_left_runs, delete_old_logs, delete_old_evidence, delete_old_profiles, delete_old_nodes)
