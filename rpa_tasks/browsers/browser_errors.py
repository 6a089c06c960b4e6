from __future__ import annotations

import errno

BROWSER_WAIT = "browser_wait"  #: every slot was busy during the whole wait
BROWSER_FAILED = "browser_failed"  #: Chromium is missing, or did not start
PROXY_FAILED = "proxy_failed"  #: the proxy cannot be used, or is not used
DISK_FULL = "disk_full"
PROFILE_BUSY = "profile_busy"  #: the shop's profile is used by another run, a person, or a process that does not end


class NoBrowser(Exception):
    """No browser is available. The run did not start."""

    def __init__(self, reason: str, detail: str = "") -> None:
        super().__init__(f"{reason}: {detail}" if detail else reason)
        self.reason = reason
        self.detail = detail


def is_disk_full(error: OSError) -> bool:
    return error.errno in (errno.ENOSPC, errno.EDQUOT)
