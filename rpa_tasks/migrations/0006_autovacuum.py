"""Autovacuum of the tables that are written with each job; lanes are few rows that are updated all the time."""

from __future__ import annotations

from django.db import migrations

OFTEN = """autovacuum_vacuum_scale_factor = 0.02, autovacuum_vacuum_threshold = 1000,
    autovacuum_analyze_scale_factor = 0.02"""
TABLES = {
    "rpa_tasks_job": f"fillfactor = 70, {OFTEN}",
    "rpa_tasks_run": OFTEN,
    "rpa_tasks_evidence": OFTEN,
    "rpa_tasks_lane": f"fillfactor = 50, {OFTEN}",
}
NAMES = "fillfactor, autovacuum_vacuum_scale_factor, autovacuum_vacuum_threshold, autovacuum_analyze_scale_factor"


class Migration(migrations.Migration):
    dependencies = [("rpa_tasks", "0005_scheduled_rounds")]

    operations = [
        migrations.RunSQL(f"ALTER TABLE {table} SET ({values})", f"ALTER TABLE {table} RESET ({NAMES})")
        for table, values in TABLES.items()
    ]
