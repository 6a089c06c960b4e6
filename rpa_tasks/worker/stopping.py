"""Whether this node's worker is on its way out. Set in the worker's main process, seen by its children: the flag is
made before they are forked."""

from __future__ import annotations

import mmap


class Flag:
    """A byte that processes share, without a lock. `multiprocessing.Event` has one even for a look: a child that is
    killed with SIGKILL while it looks keeps it for ever, and all other runs of the node wait for it."""

    def __init__(self) -> None:
        self._byte = mmap.mmap(-1, 1)

    def set(self) -> None:
        self._byte[0] = 1

    def clear(self) -> None:
        self._byte[0] = 0

    def is_set(self) -> bool:
        return self._byte[0] != 0


stopping = Flag()
