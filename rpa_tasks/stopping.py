"""Whether this node's worker is on its way out. Set in the worker's main process, seen by its children: the event is
made before they are forked."""

from __future__ import annotations

import multiprocessing

stopping = multiprocessing.Event()
