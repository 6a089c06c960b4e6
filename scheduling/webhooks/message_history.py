"""Replay, test, find, delete and erase messages of outgoing webhooks."""

from __future__ import annotations

import time
from datetime import datetime, timedelta

import structlog
from django.conf import settings
from django.db import transaction

from scheduling import sql
from scheduling.error_text import ErrorText as _
from scheduling.errors import InvalidInput
from scheduling.ids import new_id
from scheduling.ledger.anonymization import Identity
from scheduling.models import WebhookEndpoint, WebhookSubscription
from scheduling.webhooks.leases import LEASE
from scheduling.webhooks.outbox import Occurrence, wait_for_collector, write_messages

log = structlog.get_logger(__name__)

MOST_REPLAYED = 100_000  #: messages in one request
TEST_EVENT = "webhook.test"
DELETED_AT_ONCE = 5_000
LONGEST_DELETION = 1.0  #: seconds


def replay_messages(hook: WebhookSubscription, since: datetime, until: datetime, *, by: str) -> int:
    """Send again what happened from `since` to `until` and has been delivered or given up. Return the number.

    Messages keep their `webhook-id`. Those that wait stay as they are, so a repeated request adds nothing to them.

    Raises:
        InvalidInput: the range is empty or has more than `MOST_REPLAYED` messages.
    """
    if since >= until:
        raise InvalidInput.of("to", _("must be later than “from”"))
    with transaction.atomic():
        given = {"hook": hook.pk, "since": since, "until": until, "most": MOST_REPLAYED + 1}
        count = sql.execute(_REPLAY, given)
        if count > MOST_REPLAYED:
            raise InvalidInput.of("to", _("more than %(most)s messages; choose a shorter range", most=MOST_REPLAYED))
    log.info("webhook_replayed", webhook=hook.key, count=count, by=by)
    return count


def write_test_message(hook: WebhookSubscription) -> None:
    """Write a message of type `webhook.test`, whatever events the subscription has."""
    message_id = new_id()
    test = Occurrence(message_id, TEST_EVENT, f"test:{message_id}", sql.now(), {"webhook": hook.key})
    with transaction.atomic():
        write_messages([(hook.pk, test)])


def pause_endpoint(hook: WebhookSubscription) -> None:
    """Send nothing. Messages are still collected. Idempotent."""
    WebhookEndpoint.objects.filter(pk=hook.pk, paused_at=None).update(paused_at=sql.now())


def enable_endpoint(hook: WebhookSubscription) -> None:
    """End a pause, a rest or a disabled state, and the delays of waiting messages. Idempotent."""
    with transaction.atomic():
        WebhookEndpoint.objects.filter(pk=hook.pk).update(
            paused_at=None, disabled_at=None, rest_until=None, failures=0, failing_since=None
        )
        sql.execute(_END_DELAYS, {"hook": hook.pk, "lease": LEASE})


def delete_old_messages() -> int:
    """Delete messages of events older than `AFTERTOUCH_WEBHOOK_RETENTION_DAYS`, in batches, for a second at most.

    Messages that still wait by then are deleted too. Return the number.
    """
    before = sql.now() - timedelta(days=settings.AFTERTOUCH_WEBHOOK_RETENTION_DAYS)
    deleted, ends_at = 0, time.monotonic() + LONGEST_DELETION
    for hook in WebhookSubscription.objects.values_list("pk", flat=True):
        gone = DELETED_AT_ONCE
        while gone == DELETED_AT_ONCE and time.monotonic() < ends_at:
            gone = sql.execute(_DELETE_OLD, {"hook": hook, "before": before, "most": DELETED_AT_ONCE})
            deleted += gone
    return deleted


def find_messages_of_customer(user_id: str, most: int) -> list[int]:
    """Return the ids of the latest messages that name a customer, at most `most`."""
    return [row[0] for row in sql.rows(_OF_CUSTOMER, {"user_id": user_id, "most": most})]


def erase_messages_of_customer(who: Identity) -> int:
    """Remove a customer from stored messages: its ids and those of its chat, session and events. Idempotent.

    A pass that has read its events before they became anonymous stores its messages first.
    """
    given = {"user_id": who.user_id}
    with transaction.atomic():
        wait_for_collector()
        return sum(sql.execute(statement, given) for statement in (_ERASE_ENDED, _ERASE_WAITING, _ERASE_FACTS))


# A message that is due sooner may be in flight. Its lease must not end.
_END_DELAYS = """
UPDATE scheduling_webhookmessage SET due_at = statement_timestamp()
WHERE subscription_id = %(hook)s AND state = 'waiting' AND due_at > statement_timestamp() + %(lease)s::interval
"""
_REPLAY = """
UPDATE scheduling_webhookmessage
SET state = 'waiting', due_at = statement_timestamp(), ended_at = NULL, first_tried_at = NULL
WHERE id = ANY(ARRAY(
    SELECT id FROM scheduling_webhookmessage
    WHERE subscription_id = %(hook)s AND occurred_at >= %(since)s AND occurred_at <= %(until)s AND state <> 'waiting'
    ORDER BY occurred_at LIMIT %(most)s FOR UPDATE))
"""
_DELETE_OLD = """
DELETE FROM scheduling_webhookmessage WHERE id = ANY(ARRAY(
    SELECT id FROM scheduling_webhookmessage WHERE subscription_id = %(hook)s AND occurred_at < %(before)s
    ORDER BY occurred_at LIMIT %(most)s FOR UPDATE SKIP LOCKED))
"""
# Ended messages have an index of users, waiting ones are few.
_ENDED_OF = "state <> 'waiting' AND data ? 'user_id' AND data ->> 'user_id' = %(user_id)s"
_WAITING_OF = "state = 'waiting' AND data ->> 'user_id' = %(user_id)s"
_OF_CUSTOMER = f"""
SELECT id FROM scheduling_webhookmessage WHERE {_ENDED_OF}
UNION ALL SELECT id FROM scheduling_webhookmessage WHERE {_WAITING_OF}
ORDER BY id DESC LIMIT %(most)s
"""  # noqa: S608 (made of constants)
_ERASED = """
SET data = data - '{user_id,chat_id,session_id,event}'::text[],
    object_key = CASE WHEN object_key LIKE 'session:%%' THEN 'erased:' || id ELSE object_key END
"""
_ERASE_ENDED = f"UPDATE scheduling_webhookmessage {_ERASED} WHERE {_ENDED_OF}"
_ERASE_WAITING = f"UPDATE scheduling_webhookmessage {_ERASED} WHERE {_WAITING_OF}"
_ERASE_FACTS = f"UPDATE scheduling_webhookfact {_ERASED} WHERE data ->> 'user_id' = %(user_id)s"
