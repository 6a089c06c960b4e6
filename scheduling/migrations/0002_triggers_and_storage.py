"""What the ORM cannot say: the trigger behind the configuration version, and storage for a table of many updates."""

from __future__ import annotations

from django.db import migrations

EDITED = [
    "scheduling_stage",
    "scheduling_template",
    "scheduling_templatetext",
    "scheduling_channelconfig",
    "scheduling_disabledtarget",
    "scheduling_node",
    "scheduling_delayrule",
    "scheduling_harassmentrule",
    "scheduling_pause",
    "scheduling_eventtype",
]

CREATE = """
INSERT INTO scheduling_configuration (id, version, changed_at) VALUES (1, 1, now()) ON CONFLICT DO NOTHING;
CREATE FUNCTION scheduling_configuration_changed() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    INSERT INTO scheduling_configuration AS c (id, version, changed_at) VALUES (1, 1, clock_timestamp())
    ON CONFLICT (id) DO UPDATE SET version = c.version + 1, changed_at = clock_timestamp();
    RETURN NULL;
END $$;
""" + "\n".join(
    f"CREATE TRIGGER configuration_changed AFTER INSERT OR UPDATE OR DELETE ON {table} "
    f"FOR EACH STATEMENT EXECUTE FUNCTION scheduling_configuration_changed();"
    for table in EDITED
)

DROP = (
    "\n".join(f"DROP TRIGGER configuration_changed ON {table};" for table in EDITED)
    + "\nDROP FUNCTION scheduling_configuration_changed();"
)

# Each touch is updated a few times and then never again: room in the page, and an eager vacuum for the hot end.
STORAGE = """
ALTER TABLE scheduling_touch SET (fillfactor = 70, autovacuum_vacuum_scale_factor = 0.02,
    autovacuum_vacuum_threshold = 5000, autovacuum_analyze_scale_factor = 0.02);
"""


class Migration(migrations.Migration):
    dependencies = [("scheduling", "0001_initial")]

    operations = [
        migrations.RunSQL(CREATE, DROP),
        migrations.RunSQL(STORAGE, migrations.RunSQL.noop),
    ]
