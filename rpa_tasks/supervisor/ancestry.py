"""Find out by its ancestors which run a process belongs to. Needs only the standard library.

A flow can write any environment and command line, but it cannot choose its ancestors. A supervisor process adopts its
orphaned descendants, so it is an ancestor of the whole run as long as it lives. Its command line names the run.
"""

from __future__ import annotations

import os

from rpa_tasks.supervisor.processes import (
    Process,
    all_processes,
    carries_marks,
    descends,
    is_nested,
    read_file,
    read_process,
    real_uid,
)

#: Command line of a supervisor process without the folder, because another release may run from another folder. The
#: markers of its run follow as `NAME=value`.
SUPERVISOR = (b"-I", b"-S", b"rpa_tasks/supervisor/main.py")
#: Attempts to climb from a process whose ancestors end during the climb.
CLIMBS = 10


class AncestorsUnknown(Exception):
    """The process has ended, or its ancestors end during each climb."""


#: Within one pass over many processes: the run that the children of a process (pid, start) belong to. Each process is
#: then read once, whatever the depth of a chain that a flow builds.
Known = dict[tuple[int, int], "dict[str, str] | None"]


def has_supervisor(process: Process, known: Known | None = None) -> bool:
    """Return whether an ancestor is a supervisor process. Also True if this is unknown: the next pass asks again."""
    try:
        return run_of(process, known) is not None
    except AncestorsUnknown:
        return True


def run_of(process: Process, known: Known | None = None) -> dict[str, str] | None:
    """Return the markers that the process has from its supervisor process; None without one.

    The outermost supervisor process counts: a flow can start a process that looks like one. The markers are empty for
    a supervisor process of an earlier release.

    Raises: `AncestorsUnknown`.
    """
    known = {} if known is None else known
    for _ in range(CLIMBS):
        ancestors = _climb(process, known)
        if ancestors is None:
            continue
        top = ancestors[-1] if ancestors else None
        run = known.get(top) if top else None
        for ancestor in reversed(ancestors):
            if ancestor not in known:
                known[ancestor] = run if run is not None else _markers_of_supervisor(ancestor[0])
            run = known[ancestor]
        return run
    raise AncestorsUnknown


def family(ancestor: int, marks: dict[str, str], *, childless: bool = False) -> list[Process]:
    """Return all descendants of `ancestor`, and all other processes of the run with these markers.

    `childless`: the kernel reports no descendants. The search costs a third then.
    """
    known: Known = {}
    if childless:
        marked = all_processes(lambda pid: carries_marks(pid, marks))
        return [each for each in marked if belongs(each, marks, known)]
    living = {process.pid: process for process in all_processes()}
    return [each for each in living.values() if descends(each, ancestor, living) or belongs(each, marks, known)]


def belongs(process: Process, marks: dict[str, str], known: Known | None = None) -> bool:
    """Return whether the environment has all these markers, and no supervisor process has those of another run."""
    if not carries_marks(process.pid, marks):
        return False
    try:
        run = run_of(process, known)
    except AncestorsUnknown:
        return False
    return not run or marks.items() <= run.items()


def is_supervisor(pid: int) -> bool:
    """Return whether this process is a supervisor process, of this release or another."""
    return _markers_of_supervisor(pid) is not None


def _markers_of_supervisor(pid: int) -> dict[str, str] | None:
    words = read_file(f"/proc/{pid}/cmdline").split(b"\0")
    is_one = len(words) > 3 and tuple(words[1:3]) == SUPERVISOR[:2] and words[3].endswith(SUPERVISOR[2])
    # An isolated flow can start such a program, but only with another uid or in a pid namespace below this one.
    if not is_one or real_uid(pid) != os.getuid() or is_nested(pid):
        return None
    return dict(os.fsdecode(word).split("=", 1) for word in words[4:] if b"=" in word)


def _climb(process: Process, known: Known) -> list[tuple[int, int]] | None:
    """Return the ancestors, nearest first, up to one that is known.

    Return None if an ancestor has just ended: the kernel has given its children to another parent by then.
    """
    below = read_process(process.pid)
    if below is None or below.started != process.started:
        raise AncestorsUnknown
    found: list[tuple[int, int]] = []
    while below.parent:
        above = read_process(below.parent)
        if above is None and _is_child_of(below, below.parent):
            break  # /proc hides processes of other users
        if above is None or above.gone or above.started > below.started:
            return None
        found.append((above.pid, above.started))
        if found[-1] in known:
            break
        below = above
    return found


def _is_child_of(process: Process, parent: int) -> bool:
    now = read_process(process.pid)
    return now is not None and (now.started, now.parent) == (process.started, parent)
