"""Become an ordinary user and run a command: `python unprivileged.py UID COMMAND…`. For root alone.

The interpreter may lie in a home that is closed to others. It is bound into a mount namespace of this process, and no
mode on the machine changes.
"""

from __future__ import annotations

import os
import sys

sys.path.append(os.path.dirname(os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))))

from config.local.open_folders import BIND, COVER, open_folders

if __name__ == "__main__":
    uid, *command = sys.argv[1:]
    python = os.path.realpath(sys.base_prefix)
    mounts = [("/root", COVER)]
    if python.startswith("/root/"):
        mounts.append((python, BIND))
    open_folders(mounts)
    os.setgroups([])
    os.setresgid(int(uid), int(uid), int(uid))
    os.setresuid(int(uid), int(uid), int(uid))
    os.execvp(command[0], command)
