"""Become an ordinary user and run a command: `python unprivileged.py UID COMMAND…`. For root alone.

The interpreter may lie in a home that is closed to others. It is bound into a mount namespace of this process, and no
mode on the machine changes.
"""

from __future__ import annotations

import os
import sys

sys.path.append(os.path.dirname(os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))))

from rpa_tasks.supervisor import confine

if __name__ == "__main__":
    uid, *command = sys.argv[1:]
    python = os.path.realpath(sys.base_prefix)
    mounts = [("/root", confine.HIDE)]
    if python.startswith("/root/"):
        mounts.append((python, confine.READ))
    confine._mount_all(mounts)
    confine._check_call(confine._libc.umount2(b"/proc", 2), "umount")  # the one that hides other users' processes
    os.setgroups([])
    os.setresgid(int(uid), int(uid), int(uid))
    os.setresuid(int(uid), int(uid), int(uid))
    os.execvp(command[0], command)
