"""Export and erase the live session of a customer. Redis has it."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any
from uuid import UUID

from scheduling.ledger.deletion import Identity
from sessions.store import calls, client, inbox, stats
from sessions.store.inbox import live_inbox
from sessions.store.sessions import REFUSED, live_store


def export_chats(who: Identity, delivery_keys: Sequence[UUID], most: int) -> list[dict[str, Any]] | None:
    """Return the session of the customer's last frame with its messages, for JSON. None: Redis does not answer."""
    store = live_store()
    try:
        (session_id,) = store.sessions_of([who.user_id])
        if not session_id:
            return []
        found = stats.session_snapshot(store, session_id)
        if found.user_id not in ("", who.user_id):
            return []  # it was closed, and another user opened it
        entries = [entry for entry in live_inbox().since(session_id, inbox.START) if not entry.is_of_other(who.user_id)]
    except client.StoreUnavailable:
        return None
    return [
        {
            "session_id": session_id, "chat_id": found.chat_id, "state": found.state, "tags": found.tags,
            "last_user_at": found.last_user_at, "last_agent_at": found.last_agent_at,
            "messages": [{"at": inbox.stored_at(each.cursor), **json.loads(each.body)} for each in entries],
        }
    ]  # fmt: skip


def erase_sessions(who: Identity) -> int:
    """Close and delete the session of the user's last frame, its messages and the user's presence. Idempotent.

    A session that another user has opened since stays, without the messages of its former user. Redis deletes earlier
    sessions and their messages at most `SESSION_LIFETIME` after their last frame. A list of the sessions of each user
    would cost memory for each session.
    Return the number of sessions.
    """
    user_id, store = who.user_id, live_store()
    (session_id,) = store.sessions_of([user_id])
    count = 0
    if session_id and store.close(session_id, user_id).outcome == REFUSED:
        live_inbox().delete_messages_of(session_id, user_id)
    elif session_id:
        live_inbox().delete_messages(session_id)
        store.server.ask(lambda pipe: [pipe.delete(client.SESSION[client.shard_of(session_id)] + session_id)])
        count = 1
    # A user's activity lies in the shards of the sessions. `clear_active` would leave out those of an unavailable node.
    store.server.ask(
        lambda pipe: [*(pipe.zrem(key, user_id) for key in client.ACTIVE), pipe.delete(calls.presence_key(user_id))]
    )
    return count
