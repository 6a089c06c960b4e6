"""The process between a runner and the command of a run: started as a script, isolated and without site-packages, so
that it is there within milliseconds. What it does is in `rpa_tasks.supervisor.watch`."""

from __future__ import annotations

import os
import sys

if __name__ == "__main__":
    # At the end: nothing of ours may stand in front of the standard library.
    sys.path.append(os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__)))))

    from rpa_tasks.supervisor.watch import main

    main()
