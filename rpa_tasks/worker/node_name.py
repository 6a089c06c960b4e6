"""Claim the name of this execution node. Shops that prefer a node would go to either of two with one name."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path
from uuid import uuid4

from django.conf import settings

from rpa_tasks.jobs.pick import NODE_SILENT
from scheduling import sql


def claim_node_name() -> bool:
    """Take the name for this state directory. Returns False while workers of another one renew it.

    The workers of a machine share its state directory, so a crashed node takes its name again at once. A machine that
    is replaced waits until the name has been silent for `NODE_SILENT`. Of machines that ask at once one gets it.
    """
    given = {"name": settings.AFTERTOUCH_NODE, "slots": settings.AFTERTOUCH_RPA_SLOTS, "silent": NODE_SILENT}
    return bool(sql.rows(_CLAIM, given | {"state_id": read_state_id(settings.AFTERTOUCH_STATE_DIR)}))


def read_state_id(state_dir: Path) -> str:
    """Return the id of a state directory, which the first reader makes."""
    path = state_dir / "node.id"
    with suppress(FileNotFoundError):
        return path.read_text()
    state_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
    made = str(uuid4())
    own = path.with_name(made)
    own.write_text(made)
    with suppress(FileExistsError):
        os.link(own, path)  # of several readers one makes it, complete
    own.unlink()
    return path.read_text()


_CLAIM = """
INSERT INTO rpa_tasks_executionnode AS node (name, state_id, seen_at, started_at, slots, queues, browsers)
VALUES (%(name)s, %(state_id)s, statement_timestamp(), statement_timestamp(), %(slots)s, '[]', '[]')
ON CONFLICT (name) DO UPDATE SET state_id = EXCLUDED.state_id, seen_at = EXCLUDED.seen_at
WHERE node.state_id IN ('', EXCLUDED.state_id) OR node.seen_at < statement_timestamp() - %(silent)s
RETURNING name
"""
