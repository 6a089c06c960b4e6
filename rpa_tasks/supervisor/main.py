"""Entry script of the supervisor process; see `rpa_tasks.supervisor.event_loop`.

It runs isolated and without site-packages, so that it starts within milliseconds.
"""

from __future__ import annotations

import os
import sys

if __name__ == "__main__":
    # Appended, so that no module of ours shadows the standard library.
    sys.path.append(os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__)))))

    from rpa_tasks.supervisor.event_loop import main

    main()
