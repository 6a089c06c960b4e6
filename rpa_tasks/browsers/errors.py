from __future__ import annotations

import errno

BROWSER_WAIT = "browser_wait"  #: every slot was busy until the wait was over
BROWSER_FAILED = "browser_failed"  #: Chromium is missing, or did not start
DISK_FULL = "disk_full"
PROFILE_BUSY = "profile_busy"  #: somebody else has the shop's profile: another run, a person, or what would not die


class NoBrowser(Exception):
    """No browser could be had. The run did not begin."""

    def __init__(self, reason: str, detail: str = "") -> None:
        super().__init__(f"{reason}: {detail}" if detail else reason)
        self.reason = reason
        self.detail = detail


def refusal(error: OSError) -> NoBrowser:
    """The state directory cannot be written."""
    full = error.errno in (errno.ENOSPC, errno.EDQUOT)
    return NoBrowser(DISK_FULL if full else BROWSER_FAILED, str(error))
