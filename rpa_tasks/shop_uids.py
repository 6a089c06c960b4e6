"""Assign one uid to each shop of this node, and find the processes that run under it."""

from __future__ import annotations

import fcntl
import grp
import json
import os
import pwd
import zlib
from collections.abc import Container, Iterator
from contextlib import suppress
from pathlib import Path

from django.conf import settings

from rpa_tasks.browsers import registry
from rpa_tasks.browsers.browser_processes import MARKER
from rpa_tasks.browsers.registry import Record
from rpa_tasks.supervisor.ancestry import has_supervisor
from rpa_tasks.supervisor.processes import (
    Process,
    all_processes,
    carries_marks,
    is_alive,
    mount_namespace,
    read_process,
    real_uid,
)

SUBORDINATE = ("/etc/subuid", "/etc/subgid")


def uid_of(profile_id: str) -> int:
    """Return the uid of this shop on this node. It is stored per profile and never given to two shops.

    Raises: `OSError` if the range of AFTERTOUCH_RPA_UIDS is used up.
    """
    first, last = settings.AFTERTOUCH_RPA_UIDS
    name = registry.directory_name(profile_id)
    known = _stored_uids()
    if first <= known.get(name, -1) <= last:
        return known[name]
    registry.browser_root().mkdir(mode=0o700, parents=True, exist_ok=True)
    with open(registry.browser_root() / "uids.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        known = _stored_uids()
        if not first <= known.get(name, -1) <= last:
            used = set(known.values())
            free = next((uid for uid in _usable_uids(first, last) if uid not in used), None)
            if free is None:
                raise OSError(f"AFTERTOUCH_RPA_UIDS: all {last - first} are taken")
            known[name] = free
            draft = registry.browser_root() / "uids.new"
            draft.write_text(json.dumps(known))
            draft.replace(registry.browser_root() / "uids.json")
    return known[name]


def _usable_uids(first: int, last: int) -> Iterator[int]:
    """Yield all uids but the last, which is for trials.

    Each state directory starts elsewhere. Otherwise two on one machine would assign the same uids, and each would end
    the processes of the other.
    """
    size = last - first
    start = zlib.crc32(os.fsencode(registry.browser_root())) % size if size else 0
    return (first + (start + step) % size for step in range(size))


def _stored_uids() -> dict[str, int]:
    try:
        return dict(json.loads((registry.browser_root() / "uids.json").read_bytes()))
    except FileNotFoundError:
        return {}


def directories_by_uid() -> dict[int, str]:
    """Map each uid to the name of the profile's directory."""
    return {uid: name for name, uid in _stored_uids().items()}


def uids_of_others(profile_id: str) -> set[int]:
    """Return the uids of all shops except this one."""
    own = registry.directory_name(profile_id)
    return {uid for uid, name in directories_by_uid().items() if name != own}


def accounts_in_range(first: int, last: int) -> list[str]:
    """Return accounts and groups of this machine with a number in the range: a command would have their rights."""
    numbers = [(each.pw_name, each.pw_uid) for each in pwd.getpwall()]
    numbers += [(each.gr_name, each.gr_gid) for each in grp.getgrall()]
    return sorted({name for name, number in numbers if first <= number <= last})


def subordinate_ids() -> list[str]:
    """Return lines of /etc/subuid and /etc/subgid that overlap AFTERTOUCH_RPA_UIDS.

    Their users may take these uids in a user namespace, and signal or trace processes of shops.
    """
    first, last = settings.AFTERTOUCH_RPA_UIDS
    found = []
    for path in SUBORDINATE:
        with suppress(OSError):
            for line in Path(path).read_text(errors="replace").splitlines():
                fields = line.split(":")
                if len(fields) == 3 and fields[1].isdigit() and fields[2].isdigit():
                    start, count = int(fields[1]), int(fields[2])
                    if count and start <= last and start + count > first:
                        found.append(f"{path}: {line}")
    return found


def leftover_run_processes(uids: Container[int]) -> list[Process]:
    """Return processes with the uid of one of these shops that belong to no browser of the pool.

    They belong to runs, whatever their session and environment. A browser whose record was lost counts as well.
    """
    concerned = all_processes(lambda pid: real_uid(pid) in uids)
    found = [(each, uid) for each in concerned if (uid := real_uid(each.pid)) in uids]
    if not found:
        return []
    names = directories_by_uid()
    # Read after the processes: a record is written before its browser starts.
    records = registry.read_records(settings.AFTERTOUCH_RPA_BROWSERS).values()
    browsers = {registry.directory_name(record.profile): record for record in records if record and record.profile}
    return [each for each, uid in found if not _belongs_to_browser(each, browsers.get(names.get(uid, "")))]


def _belongs_to_browser(process: Process, record: Record | None) -> bool:
    """Return whether the process belongs to the browser in the record of its shop's slot.

    A run's process can forge the mark in an environment, but cannot enter the session or mount namespace of a browser.
    Before the pid is recorded only the mark is available, which counts without a supervisor process. A forged mark is
    found as soon as the browser has started.
    """
    if record is None:
        return False
    if record.pid:
        space = mount_namespace(record.pid)
        return is_alive(record.pid, record.ticks) and (
            process.session == record.pid or (space is not None and mount_namespace(process.pid) == space)
        )
    # Zygotes and renderers have overwritten their mark; the browser that leads their session has not.
    marks = {MARKER: registry.slot_marker(record.slot)}
    leader = read_process(process.session)
    is_marked = carries_marks(process.pid, marks) or (leader is not None and carries_marks(leader.pid, marks))
    return is_marked and not has_supervisor(process)
