"""Turn webhooks of chat systems into frames: `/chat-hooks/chatwoot` and `/chat-hooks/rocketchat`.

A hook has no API key. Its proof is the secret that both sides know. A system repeats a webhook after an error; ids or
times of messages are the `seq`, so a repeat counts once.
"""

from __future__ import annotations

import hashlib
import hmac
import time
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from typing import Any, NamedTuple

import structlog
from django.conf import settings
from django.http import HttpRequest, JsonResponse
from django.views.decorators.cache import never_cache
from django.views.decorators.csrf import csrf_exempt
from django.views.decorators.http import require_POST

from scheduling.errors import InvalidInput
from scheduling.strict_text import InvalidText, decode_json
from sessions.frames import AGENT, MOST_TAGS, USER, Frame, is_tag
from sessions.store.client import StoreUnavailable
from sessions.store.sessions import OUTCOMES, live_store

log = structlog.get_logger(__name__)

SIGNATURE_VALID_FOR = 300  #: seconds between the time of a signature and this node's clock


@csrf_exempt
@never_cache
@require_POST
def receive_chat_hook(request: HttpRequest, system: str) -> JsonResponse:
    """Count the frames of a webhook. 404 without a configured secret, 401 for a wrong one."""
    chats = SYSTEMS.get(system)
    secret: str = getattr(settings, chats.secret_setting) if chats else ""
    if not chats or not secret:
        return JsonResponse({"detail": "This chat system is not configured."}, status=404)
    if not chats.is_authentic(request, secret):
        return JsonResponse({"detail": "The signature or token is wrong."}, status=401)
    try:
        found = decode_json(request.body)
        frames = list(chats.convert(found if isinstance(found, dict) else {}))
        outcomes = [OUTCOMES.get(noted.outcome, "refused") for noted in live_store().note_activity(frames)]
    except InvalidText as error:
        return JsonResponse({"detail": f"The body is not JSON: {error}."}, status=400)
    except InvalidInput as error:
        errors = [{"field": each.field, "message": each.message} for each in error.errors]
        return JsonResponse({"detail": "The payload does not fit.", "errors": errors}, status=422)
    except StoreUnavailable as error:
        log.warning("chat_hook_failed", system=system, error=str(error))
        return JsonResponse({"detail": "The live sessions cannot be reached."}, status=503)
    return JsonResponse({"outcomes": outcomes})


# --- Chatwoot -----------------------------------------------------------------------------------------------------


def is_signed_by_chatwoot(request: HttpRequest, secret: str) -> bool:
    """Check `X-Chatwoot-Signature`: `sha256=` and the HMAC of the timestamp, a dot and the body."""
    sent_at = request.headers.get("X-Chatwoot-Timestamp", "")
    if not (sent_at.isascii() and sent_at.isdigit() and abs(time.time() - int(sent_at[:12])) <= SIGNATURE_VALID_FOR):
        return False
    digest = hmac.new(secret.encode(), sent_at.encode() + b"." + request.body, hashlib.sha256).hexdigest()
    return _is_equal(request.headers.get("X-Chatwoot-Signature", ""), f"sha256={digest}")


def convert_chatwoot(payload: dict[str, Any]) -> Iterator[Frame]:
    """Yield the frames of a webhook. Private notes and messages of bots and templates are no frames."""
    event = payload.get("event")
    if event == "conversation_status_changed" and payload.get("status") == "resolved":
        yield _chatwoot_frame(payload, AGENT, "close")
    elif payload.get("private") or payload.get("is_private"):
        return
    elif event == "message_created":
        sender = {"incoming": USER, "outgoing": AGENT}.get(str(payload.get("message_type")))
        if sender and _nested_member(payload, "sender").get("type") != "agent_bot":
            yield _chatwoot_frame(_nested_member(payload, "conversation"), sender, "message", seq=payload.get("id"))
    elif event == "conversation_typing_on":
        sender = AGENT if _nested_member(payload, "user").get("type") == "user" else USER
        yield _chatwoot_frame(_nested_member(payload, "conversation"), sender, "typing")


def _chatwoot_frame(conversation: dict[str, Any], sender: str, kind: str, seq: Any = None) -> Frame:
    inbox, number = conversation.get("inbox_id"), conversation.get("id")
    contact = _nested_member(conversation, "meta", "sender")
    if not _are_ids(inbox, number, contact.get("id")):
        raise InvalidInput.of("conversation", "must have id, inbox_id and meta.sender.id")
    return Frame(
        f"chatwoot-{inbox}-{number}", f"chatwoot-{contact['id']}", f"chatwoot-{inbox}", sender, kind, seq,
        tags=_fitting_tags(conversation.get("labels")),
    )  # fmt: skip


# --- Rocket.Chat --------------------------------------------------------------------------------------------------

#: Frames of an agent by type of webhook.
_ROCKETCHAT_KINDS = {
    "LivechatSession": "close", "LivechatSessionQueued": "queue", "LivechatSessionTaken": "resume",
    "LivechatSessionForwarded": "transfer",
}  # fmt: skip
_NO_FRAMES = {"editedAt", "navigation", "closingMessage"}  #: members of messages that are no frames


def is_sent_by_rocketchat(request: HttpRequest, secret: str) -> bool:
    return _is_equal(request.headers.get("X-RocketChat-Livechat-Token", ""), secret)


def convert_rocketchat(payload: dict[str, Any]) -> Iterator[Frame]:
    """Yield the frames of a webhook. Edited messages, pages visited and closing messages are no frames."""
    kind = str(payload.get("type"))
    if kind in _ROCKETCHAT_KINDS:
        yield _rocketchat_frame(payload, AGENT, _ROCKETCHAT_KINDS[kind])
    elif kind == "Message":
        messages = payload.get("messages")
        for message in messages if isinstance(messages, list) else []:
            if isinstance(message, dict) and not _NO_FRAMES & message.keys():
                sender = AGENT if message.get("agentId") else USER
                yield _rocketchat_frame(payload, sender, "message", seq=_milliseconds(message.get("ts")))


def _rocketchat_frame(room: dict[str, Any], sender: str, kind: str, seq: int | None = None) -> Frame:
    visitor = _nested_member(room, "visitor").get("_id")
    if not _are_ids(room.get("_id"), visitor):
        raise InvalidInput.of("visitor", "the payload must have _id and visitor._id")
    tags = _fitting_tags(room.get("tags"))
    return Frame(f"rocketchat-{room['_id']}", f"rocketchat-{visitor}", "", sender, kind, seq, tags=tags)


def _milliseconds(instant: Any) -> int:
    try:
        at = datetime.fromisoformat(instant)
    except (TypeError, ValueError):
        raise InvalidInput.of("messages.ts", "must be an instant like 2026-01-31T08:00:00.000Z") from None
    return int((at if at.tzinfo else at.replace(tzinfo=UTC)).timestamp() * 1000)


# --- both ---------------------------------------------------------------------------------------------------------


def _is_equal(given: str, wanted: str) -> bool:
    return hmac.compare_digest(given.encode("utf-8", "replace"), wanted.encode())


def _are_ids(*given: Any) -> bool:
    return all(type(each) in (int, str) and each for each in given)


def _nested_member(found: Any, *names: str) -> dict[str, Any]:
    """Return a nested object, empty where it is missing."""
    for name in names:
        found = found.get(name) if isinstance(found, dict) else None
    return found if isinstance(found, dict) else {}


def _fitting_tags(given: Any) -> list[str]:
    """Return the labels that fit as tags. An odd label must not stop the detection."""
    return [each for each in given if is_tag(each)][:MOST_TAGS] if isinstance(given, list) else []


class ChatSystem(NamedTuple):
    secret_setting: str
    is_authentic: Callable[[HttpRequest, str], bool]
    convert: Callable[[dict[str, Any]], Iterator[Frame]]


SYSTEMS = {
    "chatwoot": ChatSystem("AFTERTOUCH_CHATWOOT_SECRET", is_signed_by_chatwoot, convert_chatwoot),
    "rocketchat": ChatSystem("AFTERTOUCH_ROCKETCHAT_TOKEN", is_sent_by_rocketchat, convert_rocketchat),
}
