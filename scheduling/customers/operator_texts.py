"""Remove an erased customer from what operators typed: filters, reasons, notes, comments and the log of actions."""

from __future__ import annotations

from django.apps import apps
from simple_history.models import HistoricalChanges

from scheduling import sql
from scheduling.ledger.anonymization import Identity

#: Columns that are emptied as a whole, besides the reasons of versions.
TEXTS = (
    ("django_admin_log", "change_message"),
    ("django_admin_log", "object_repr"),
    ("scheduling_bulkaction", "reason"),
    ("scheduling_bulkaction", "note"),
    ("scheduling_failedtask", "action_reason"),
    ("scheduling_failedtaskcomment", "text"),
    ("scheduling_pause", "reason"),
    ("scheduling_customerimport", "file_name"),
    ("django_celery_beat_periodictask", "description"),
    ("scheduling_auditentry", "label"),
    ("scheduling_auditentry", "reason"),
)


def list_text_columns() -> list[tuple[str, str]]:
    """Return tables and columns of texts that are emptied if they name the customer."""
    versions = [model._meta.db_table for model in apps.get_models() if issubclass(model, HistoricalChanges)]
    return [*TEXTS, *((table, "history_change_reason") for table in versions)]


def erase_operator_texts(who: Identity) -> int:
    """Empty texts that name the customer. Return the number of rows. Idempotent.

    A running bulk action that selects by them is cancelled: with another filter it would act on other rows.
    """
    given = {"text": who.build_pattern(), "values": [who.user_id, *who.addresses, *who.names]}
    count = sum(sql.execute(_EMPTY.format(table=table, column=column), given) for table, column in list_text_columns())
    return count + sum(sql.execute(each, given) for each in (_EMPTY_BULK_FILTERS, _EMPTY_AUDIT))


_EMPTY = "UPDATE {table} SET {column} = '' WHERE {column} ~ %(text)s"
_EMPTY_AUDIT = "UPDATE scheduling_auditentry SET changes = '[]' WHERE changes::text ~ %(text)s"
_NAMED = "(value ~ %(text)s OR value = ANY(%(values)s::text[]))"
_EMPTY_BULK_FILTERS = f"""
UPDATE scheduling_bulkaction AS b
SET filter = (SELECT jsonb_object_agg(key, CASE WHEN {_NAMED} THEN 'erased' ELSE value END)
              FROM jsonb_each_text(b.filter)),
    state = CASE b.state WHEN 'running' THEN 'cancelled' ELSE b.state END,
    ended_at = CASE b.state WHEN 'running' THEN statement_timestamp() ELSE b.ended_at END,
    ended_by = CASE b.state WHEN 'running' THEN 'erasure' ELSE b.ended_by END
WHERE EXISTS (SELECT FROM jsonb_each_text(b.filter) WHERE {_NAMED})
"""  # noqa: S608 (made of constants)
