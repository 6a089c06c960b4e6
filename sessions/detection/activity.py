"""What the chats say about when customers were last active, on its way to the core: at most hourly a session."""

from __future__ import annotations

from scheduling.planning.activity import raise_last_active
from sessions.store.brief import brief_transaction
from sessions.store.sessions import Store

ACTIVITY_BATCH = 300  #: customers a pass: a watcher does this between two looks at its deadlines, and again while more wait


def note(store: Store) -> int:
    """Note some of what frames have brought. What dies between is noted again. Returns how many customers."""
    by_shard = store.active_users(ACTIVITY_BATCH)
    if not by_shard:
        return 0
    seen = {user_id: at for users in by_shard.values() for user_id, at in users.items()}
    with brief_transaction():
        noted = raise_last_active(seen)
    done = {shard: noted & users.keys() for shard, users in by_shard.items()}
    if noted:
        store.forget_active({shard: users for shard, users in done.items() if users})
    return len(noted)
