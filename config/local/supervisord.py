"""Run supervisord for `config.local.supervisor`, with two additions.

A program that gets SIGTERM between fork and exec ends. Python's handler, which a forked child inherits, would drop the
signal, and the program would run until the SIGKILL up to 45 s later.

Programs may open many files. The setting `minfds` would make each child close that many descriptors one by one.
"""

from __future__ import annotations

import os
import resource
import signal

from supervisor import supervisord  # type: ignore[import-untyped,unused-ignore]

OPEN_FILES = 65_536
STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGQUIT, signal.SIGHUP)


def keep_stop_signals_for_children() -> None:
    """Block stop signals during each fork, and give them their default effect in the child."""
    os.register_at_fork(before=_block, after_in_parent=_unblock, after_in_child=_reset)


def _block() -> None:
    signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)


def _unblock() -> None:
    signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)


def _reset() -> None:
    for number in STOP_SIGNALS:
        signal.signal(number, signal.SIG_DFL)
    _unblock()


def raise_file_limit() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = OPEN_FILES if hard == resource.RLIM_INFINITY else min(hard, OPEN_FILES)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, most), hard))


if __name__ == "__main__":
    keep_stop_signals_for_children()
    raise_file_limit()
    supervisord.main()
