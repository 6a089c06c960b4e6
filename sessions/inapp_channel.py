"""Channel `inapp`: a touch appears in the customer's open chat.

Delivered means stored in the inbox of a known session. Open pages receive it at once, others when they reconnect with
their cursor. The delivery key is the inbox key, so a repeated send stores the message once.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from datetime import timedelta
from typing import Any, ClassVar

from django.conf import settings

from scheduling.batching import BatcherOverloaded, MicroBatcher
from scheduling.channels import options
from scheduling.channels.base import Channel, Delivered, InvalidSetting, Message, Outcome, Permanent, Transient, Unknown
from scheduling.error_text import ErrorText as _
from sessions.detection.presence import SILENT, UNANSWERED, parse_event_id
from sessions.event_loops import once_per_loop
from sessions.frames import ID_LENGTH
from sessions.store import sessions
from sessions.store.client import StoreUnavailable
from sessions.store.inbox import SYSTEM, Post, Posted
from sessions.websocket import hub

BATCH_WINDOW = 0.005  #: seconds


class InApp(Channel):
    """Sends to the inbox of a session. No configuration.

    The optional `address`, from the customer's address `inapp`, is a session id. Without it, uses the session that
    fell silent, else the session of the customer's last frame within the conversation window.
    """

    kind: ClassVar[str] = "inapp"
    address_key = "inapp"
    default_idempotent = True

    def __init__(self, config: Mapping[str, Any], timeout: timedelta) -> None:
        super().__init__(config, timeout)
        options.check_known_keys(config, ())

    @classmethod
    def validate_target(cls, target: Mapping[str, Any]) -> None:
        options.check_known_keys(target, ("address",))
        if len(options.read_text(target, "address")) > ID_LENGTH:
            raise InvalidSetting("address", _("must have at most %(most)s characters", most=ID_LENGTH))

    def target_key(self, message: Message) -> str:
        return self.kind

    async def attempt(self, message: Message) -> Outcome:
        """Store the message, then notify open pages. Idempotent, so errors are retried."""
        try:
            async with asyncio.timeout(self.timeout.total_seconds()):
                post, posted = await _post_writer().submit_and_wait(_build_post(message))
        except BatcherOverloaded:
            return Transient("inapp_busy", retry_after=timedelta(seconds=1))
        except (StoreUnavailable, TimeoutError) as error:
            return Unknown("inapp_away", str(error)[:500])
        if posted.outcome == "unavailable":
            return Unknown("inapp_away", "the node does not answer")
        if posted.outcome in ("no_session", "other_user"):
            return Permanent("no_session", "the customer has no chat that is open")
        if posted.outcome == "stored":
            await hub.hub().notify(post.session_id, hub.message_notification(post, posted))
        return Delivered(f"{posted.outcome} {posted.cursor}".strip())


def _build_post(message: Message) -> Post:
    """Build the post of a message. `seq` is None, because the system has no order of frames.

    The session of an address or of a silence may belong to another user now: a close drops its owner.
    """
    address = str(message.target.get("address") or "")
    if message.event.get("type") in (SILENT, UNANSWERED):
        address = parse_event_id(str(message.event.get("id", "")))[0]
    more = {"node": message.node, "content_type": message.content_type, "subject": message.subject}
    return Post(
        address, str(message.delivery_key), SYSTEM, message.body,
        key=f"touch:{message.delivery_key}", user_id=message.user_id, more=more,
    )  # fmt: skip


def _store_posts(posts: Sequence[Post]) -> list[tuple[Post, Posted]]:
    """Find missing session ids, then store the posts. Runs in a thread."""
    store, window = sessions.live_store(), settings.AFTERTOUCH_CONVERSATION_WINDOW
    lost = [post.user_id for post in posts if not post.session_id]
    found: Iterable[str | None]
    try:
        found = store.sessions_of(lost, within=window) if lost else ()
    except StoreUnavailable:
        if len(lost) == len(posts):
            raise
        found = [None] * len(lost)
    session_ids = iter(found)
    placed = [(post, post.session_id or next(session_ids)) for post in posts]
    known = [replace(post, session_id=session_id) for post, session_id in placed if session_id]
    stored = zip(known, store.put_messages(known), strict=True)
    nowhere = {"": "no_session", None: "unavailable"}
    return [next(stored) if session_id else (post, Posted(nowhere[session_id])) for post, session_id in placed]


@once_per_loop
def _post_writer() -> MicroBatcher[Post, tuple[Post, Posted]]:
    return MicroBatcher(_store_posts, moment=BATCH_WINDOW, name="inapp")
