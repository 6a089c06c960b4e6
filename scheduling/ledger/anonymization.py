"""Remove personal data from touches and failed tasks of an erased customer, or delete those of sample data.

After an erasure states and figures stay for the statistics.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Sequence
from datetime import datetime
from typing import Any, NamedTuple
from urllib.parse import quote, quote_plus
from uuid import UUID

from scheduling import sql
from scheduling.ledger.touches import touch_ledger
from scheduling.models.customer import CustomerErasure, digest_user_id

REASON = "by:erasure"
SHORTEST_WORD = 6  #: characters of an id or an address that is found anywhere


class Identity(NamedTuple):
    """What identifies an erased customer, until the erasure has ended."""

    user_id: str
    addresses: tuple[str, ...] = ()  #: present and former ones
    names: tuple[str, ...] = ()  #: present and former ones; other customers may have the same

    @property
    def words(self) -> list[str]:
        """Return the id and the addresses that identify the customer anywhere."""
        return [each for each in (self.user_id, *self.addresses) if len(each) >= SHORTEST_WORD]

    def build_search(self) -> dict[str, Any]:
        """Return the parameters of `build_json_search`, and `words`."""
        names = {"ids": _add_numbers([self.user_id]), "words": _add_numbers(self.words)}
        return {"names": json.dumps(names), "words": self.words, "text": self.build_pattern()}

    def build_pattern(self) -> str:
        """Return a regular expression of PostgreSQL for texts that name the customer.

        A long word may stand anywhere, plain or encoded for a URL. A short one and a name, which other texts may
        contain, must be quoted or the value of a filter.
        """
        short = _join_forms({self.user_id, *self.addresses, *self.names} - set(self.words))
        long = _join_forms(self.words)
        found = [rf"(^|[^[:alnum:]_-]|%[0-9A-Fa-f]{{2}})({long})($|[^[:alnum:]_-])"] if long else []
        return "|".join([*found, *([f"[=\"']({short})($|[&\"'])"] if short else [])])


def read_erasure_times(user_ids: Iterable[str]) -> dict[str, datetime]:
    """Return when the last erasure of each user was requested, of those that were erased.

    Call it after the insert of the users: an insert can wait for the request of an erasure.
    """
    digests = {digest_user_id(each): each for each in user_ids}
    found = CustomerErasure.objects.filter(digest__in=digests).order_by("requested_at")
    return {digests[digest]: at for digest, at in found.values_list("digest", "requested_at")}


def _add_numbers(words: Sequence[str]) -> list[str | int]:
    return [*words, *(int(each) for each in words if each.isascii() and each.isdigit())]


def _join_forms(words: Iterable[str]) -> str:
    """Return the alternatives: plain, encoded for a URL and escaped for JSON."""
    forms = {form for each in words for form in (each, quote(each, safe=""), quote_plus(each), json.dumps(each)[1:-1])}
    return "|".join(re.escape(form) for form in sorted(forms))


def build_json_search(column: str) -> str:
    """Return the condition that a value or a key anywhere in a JSON column equals the id or an address.

    Words shorter than `SHORTEST_WORD` are often something else, such as an amount. They count in a member `user_id`.
    """
    paths = (
        "$.**.user_id ? (@ == $ids[*])",
        "$.** ? (@ == $words[*])",
        '$.** ? (@.type() == "object").keyvalue() ? (@.key == $words[*])',
    )
    found = " OR ".join(f"jsonb_path_exists({column}, '{path}', %(names)s::jsonb)" for path in paths)
    return f"({found})"


def cancel_unsent(customer_id: int) -> int:
    """Cancel the unsent touches of a locked customer. Return how many are still being sent."""
    unsent = [row[0] for row in sql.rows(_UNSENT, {"customer": customer_id})]
    return len(unsent) - len(touch_ledger.cancel(unsent, reason=REASON)) if unsent else 0


def anonymize_touches(event_ids: Sequence[UUID]) -> tuple[list[UUID], list[UUID]]:
    """Remove texts and details of the ended touches of these events. Return their ids and their delivery keys.

    The id of a chat stays if it names a stored community: it names a group then.
    """
    rows = sql.rows(_ANONYMIZE, {"events": list(event_ids)})
    return [row[0] for row in rows], [row[1] for row in rows]


def delete_touches_of(event_ids: Sequence[UUID]) -> tuple[list[UUID], int]:
    """Delete the touches of these events with their failed tasks. Return their ids and how many are being sent.

    Call it while the customers are locked. A touch that a worker holds stays.
    """
    deleted = [row[0] for row in sql.rows(_DELETE_TOUCHES_OF, {"events": list(event_ids)})]
    ((running,),) = sql.rows(_COUNT_TOUCHES_OF, {"events": list(event_ids)})
    sql.execute(_DELETE_COMMENTS_OF, {"ids": deleted})
    sql.execute("DELETE FROM scheduling_failedtask WHERE task_id = ANY(%(ids)b)", {"ids": deleted})
    return deleted, running


def lock_failed_tasks(event_ids: Sequence[UUID]) -> None:
    """Lock the failed tasks of these events' touches. A retry locks them before their touches too."""
    sql.rows(_LOCK_FAILED, {"events": list(event_ids)})


def empty_failed_tasks(task_ids: Sequence[UUID]) -> int:
    """Remove payload, details, difference and comments of failed tasks. Return their number.

    Those that wait for a person are archived. A failed task that was edited into one of these tasks is emptied too: its
    difference holds the same payload.
    """
    return _empty_failed(_OF_TASKS, {"ids": list(task_ids)})


def empty_failed_tasks_of_customer(who: Identity) -> int:
    """As `empty_failed_tasks`, for those whose payload or difference names the customer.

    Broker messages are stored as text.
    """
    return _empty_failed(_NAMED_FAILED, who.build_search())


def _empty_failed(condition: str, given: dict[str, Any]) -> int:
    emptied = [row[0] for row in sql.rows(f"{_EMPTY_FAILED} WHERE {condition} RETURNING f.id", given)]
    # A later statement: a comment that was committed while the update waited for its row is found too.
    sql.execute(_DELETE_COMMENTS, {"ids": emptied})
    blank_log_entries(emptied)
    return len(emptied)


def find_failed_tasks_of_customer(who: Identity, task_ids: Sequence[UUID], most: int) -> list[UUID]:
    """Return the latest failed tasks of these touches, and those whose payload names the customer."""
    given = {**who.build_search(), "ids": list(task_ids), "most": most}
    return [row[0] for row in sql.rows(_LIST_FAILED, given)]


def blank_log_entries(keys: Sequence[UUID]) -> int:
    """Remove the texts of log entries of rows with these keys, and of the failed tasks of these touches and jobs."""
    return sql.execute(_BLANK_LOG, {"keys": list(keys)})


_UNSENT = """
SELECT task_id FROM scheduling_touch WHERE customer_id = %(customer)s AND state IN ('scheduled', 'queued', 'running')
ORDER BY task_id
"""

# Entries 6, 8 and 9 of an attempt are detail, subject and body; entry 4 of a verdict is what the guard observed
# (`models.touch`). A row of a community without name and targets exists for its lock only.
_ANONYMIZE = """
UPDATE scheduling_touch AS t
SET chat_id = CASE WHEN EXISTS (SELECT FROM scheduling_community AS c WHERE c.chat_id = t.chat_id
                                AND (c.name <> '' OR c.targets <> ''))
                   THEN t.chat_id ELSE '' END,
    attempts = (SELECT jsonb_agg(jsonb_set(a.entry - 9 - 8, '{6}', '""', false) ORDER BY a.number)
                FROM jsonb_array_elements(t.attempts) WITH ORDINALITY AS a(entry, number)),
    verdicts = (SELECT jsonb_agg(jsonb_set(v.entry, '{4}', '""', false) ORDER BY v.number)
                FROM jsonb_array_elements(t.verdicts) WITH ORDINALITY AS v(entry, number))
WHERE t.event_id = ANY(%(events)b)
RETURNING t.task_id, COALESCE(t.root_id, t.task_id)
"""

_LOCK_FAILED = """
SELECT f.id FROM scheduling_failedtask AS f
WHERE f.task_id IN (SELECT t.task_id FROM scheduling_touch AS t WHERE t.event_id = ANY(%(events)b))
ORDER BY f.id FOR UPDATE
"""
_EMPTY_FAILED = """
UPDATE scheduling_failedtask AS f
SET detail = '', difference = NULL, payload = jsonb_build_object('node', f.payload -> 'node'),
    state = CASE WHEN f.state IN ('open', 'ignored') THEN 'archived' ELSE f.state END,
    acted_at = COALESCE(f.acted_at, statement_timestamp()), -- retention counts from it
    attempts = COALESCE((SELECT jsonb_agg(a || '{"detail": ""}') FROM jsonb_array_elements(f.attempts) AS a), '[]')
"""
_DELETE_COMMENTS = "DELETE FROM scheduling_failedtaskcomment WHERE failed_task_id = ANY(%(ids)b)"
_OF_TASKS = "f.task_id = ANY(%(ids)b) OR (f.retried_as = ANY(%(ids)b) AND f.difference IS NOT NULL)"
_NAMED_FAILED = f"""
({build_json_search("f.payload")} OR {build_json_search("f.difference")}
 OR f.origin = 'message' AND f.payload ->> 'message' ~ %(text)s)
"""
_LIST_FAILED = f"""
SELECT f.id FROM scheduling_failedtask AS f WHERE f.task_id = ANY(%(ids)b) OR {_NAMED_FAILED}
ORDER BY f.id DESC LIMIT %(most)s
"""
_BLANK_LOG = """
UPDATE django_admin_log SET object_repr = '', change_message = ''
WHERE (object_repr <> '' OR change_message <> '') AND object_id IN (
    SELECT key::text FROM unnest(%(keys)b::uuid[]) AS key
    UNION ALL SELECT f.id::text FROM scheduling_failedtask AS f WHERE f.task_id = ANY(%(keys)b))
"""
_DELETE_TOUCHES_OF = """
DELETE FROM scheduling_touch WHERE event_id = ANY(%(events)b) AND state <> 'running' RETURNING task_id
"""
_COUNT_TOUCHES_OF = "SELECT count(*) FROM scheduling_touch WHERE event_id = ANY(%(events)b)"
_DELETE_COMMENTS_OF = """
DELETE FROM scheduling_failedtaskcomment AS c USING scheduling_failedtask AS f
WHERE f.id = c.failed_task_id AND f.task_id = ANY(%(ids)b)
"""
