"""Autovacuum of the tables that are written with each event or touch.

By default a table is vacuumed after a fifth of it has changed: of a hundred million rows, after twenty million.
"""

from __future__ import annotations

from django.db import migrations

APPENDED = """autovacuum_vacuum_insert_scale_factor = 0.02, autovacuum_vacuum_insert_threshold = 20000,
    autovacuum_vacuum_scale_factor = 0.02, autovacuum_vacuum_threshold = 5000, autovacuum_analyze_scale_factor = 0.02"""
UPDATED = """autovacuum_vacuum_scale_factor = 0.02, autovacuum_vacuum_threshold = 5000,
    autovacuum_analyze_scale_factor = 0.02"""
TABLES = {
    "scheduling_event": APPENDED,
    "scheduling_verdict": APPENDED,
    "scheduling_attempt": APPENDED,
    "scheduling_customer": f"fillfactor = 85, {UPDATED}",
    "scheduling_failedtask": UPDATED,
}
NAMES = (
    "fillfactor, autovacuum_vacuum_insert_scale_factor, autovacuum_vacuum_insert_threshold, "
    "autovacuum_vacuum_scale_factor, autovacuum_vacuum_threshold, autovacuum_analyze_scale_factor"
)


class Migration(migrations.Migration):
    dependencies = [("scheduling", "0016_disabled_targets")]

    operations = [
        migrations.RunSQL(f"ALTER TABLE {table} SET ({values})", f"ALTER TABLE {table} RESET ({NAMES})")
        for table, values in TABLES.items()
    ]
