"""Create the tables, the triggers of the configuration version and of references, and the options of busy tables."""

import datetime
import django.contrib.postgres.fields
import django.contrib.postgres.indexes
import django.db.models.deletion
import django.db.models.fields.json
import django.db.models.functions.datetime
import django.utils.timezone
import scheduling.ids
import scheduling.models.encrypted
import scheduling.models.touch
import simple_history.models
import scheduling.errors
import scheduling.models.versioned
from django.conf import settings
from django.db import migrations, models

from scheduling.migrations.operations import CreateModels

# The tables that operators edit. A bounce writes `scheduling_disabledtarget`: it must not make every process reload.
EDITED = [
    'scheduling_stage',
    'scheduling_template',
    'scheduling_templatetext',
    'scheduling_channelconfig',
    'scheduling_node',
    'scheduling_delayrule',
    'scheduling_calendar',
    'scheduling_harassmentrule',
    'scheduling_holdout',
    'scheduling_pause',
    'scheduling_eventtype',
    'scheduling_webhooksubscription',
]

CREATE_FUNCTION = """
INSERT INTO scheduling_configuration (id, version, changed_at) VALUES (1, 1, now()) ON CONFLICT DO NOTHING;
CREATE FUNCTION scheduling_configuration_changed() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    INSERT INTO scheduling_configuration AS c (id, version, changed_at) VALUES (1, 1, clock_timestamp())
    ON CONFLICT (id) DO UPDATE SET version = c.version + 1, changed_at = clock_timestamp();
    RETURN NULL;
END $$;
"""
CREATE_TRIGGER = (
    'CREATE TRIGGER configuration_changed AFTER INSERT OR UPDATE OR DELETE ON {table} '
    'FOR EACH STATEMENT EXECUTE FUNCTION scheduling_configuration_changed()'
)

# Rows that may not be deleted while another table refers to them: table, referring table, its column.
REFERRED = [
    ('scheduling_customer', 'scheduling_event', 'customer_id'),
    ('scheduling_event', 'scheduling_touch', 'event_id'),
    ('scheduling_node', 'scheduling_touch', 'node_id'),
    ('scheduling_template', 'scheduling_touch', 'template_id'),
]
# A writer locks the row that its own rows will refer to. A deletion waits for that lock, and the query of the trigger
# starts after it. With an older snapshot the query would not see the rows of that writer.
REFUSE_DELETION = """
CREATE FUNCTION {table}_refuse_deletion() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    IF current_setting('transaction_isolation') <> 'read committed' THEN
        RAISE feature_not_supported USING MESSAGE = 'delete from {table} in READ COMMITTED only';
    END IF;
    IF EXISTS (SELECT FROM {referring} WHERE {column} = OLD.id) THEN
        RAISE foreign_key_violation USING MESSAGE = format('{table} %s is referenced by {referring}', OLD.id);
    END IF;
    RETURN NULL;
END $$;
CREATE TRIGGER referred AFTER DELETE ON {table} FOR EACH ROW EXECUTE FUNCTION {table}_refuse_deletion();
"""

# The search for a part of a name: all texts of one and two letters in it, so that two Chinese letters are found too.
# Trigrams find them by reading the whole index. The trigger keeps the copy of the name that the index is made of: an
# index on the customers would get an entry for each part at every activity.
NAME_SEARCH = """
CREATE FUNCTION scheduling_name_parts(name text) RETURNS text[] LANGUAGE sql IMMUTABLE STRICT PARALLEL SAFE AS $$
    SELECT COALESCE(array_agg(DISTINCT substr(lower(name), at, size)), '{}')
    FROM generate_series(1, length(name)) AS at, generate_series(1, 2) AS size
    WHERE at + size <= length(name) + 1
$$;
CREATE INDEX customer_name_parts ON scheduling_customerprofile USING gin (scheduling_name_parts(name));
CREATE FUNCTION scheduling_copy_customer_name() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    INSERT INTO scheduling_customerprofile AS p (customer_id, attributes, tags, name)
    VALUES (NEW.id, '{}', '{}', NEW.name)
    ON CONFLICT (customer_id) DO UPDATE SET name = EXCLUDED.name;
    RETURN NULL;
END $$;
CREATE TRIGGER name_given AFTER INSERT ON scheduling_customer FOR EACH ROW WHEN (NEW.name <> '')
EXECUTE FUNCTION scheduling_copy_customer_name();
CREATE TRIGGER name_changed AFTER UPDATE OF name ON scheduling_customer FOR EACH ROW WHEN (NEW.name <> OLD.name)
EXECUTE FUNCTION scheduling_copy_customer_name();
"""
DROP_NAME_SEARCH = """
DROP FUNCTION scheduling_copy_customer_name() CASCADE;
DROP FUNCTION scheduling_name_parts(text) CASCADE;
"""

# By default PostgreSQL vacuums a table after a fifth of it has changed: of a hundred million rows, after twenty million.
UPDATED = (
    'autovacuum_vacuum_scale_factor = 0.02, autovacuum_vacuum_threshold = 5000, autovacuum_analyze_scale_factor = 0.02'
)
APPENDED = f'autovacuum_vacuum_insert_scale_factor = 0.02, autovacuum_vacuum_insert_threshold = 20000, {UPDATED}'
# Workers update a touch and a customer several times: free space in the page keeps the new version there.
STORAGE = {
    'scheduling_touch_live': f'fillfactor = 70, {UPDATED}',
    'scheduling_event': APPENDED,
    'scheduling_customer': f'fillfactor = 85, {UPDATED}',
    'scheduling_failedtask': UPDATED,
    'scheduling_customerchange': APPENDED,
    'scheduling_webhookmessage': APPENDED,
    'scheduling_deliveryreceipt': APPENDED,
    'scheduling_vendormessage': APPENDED,
}

# A row that ends moves from the live part to a partition of the week of its end (decision 34). The indexes of the live
# part that hold ended rows only stay empty. `touch_ended_at` has the key of a row too: else an index of equal instants is
# smaller than the history of customers, and PostgreSQL scans it for each customer of a partition without statistics.
# A few rows of one customer, once analyzed, must not make PostgreSQL expect all rows of the live part for each customer.
PARTITION_TOUCHES = """
ALTER TABLE scheduling_touch RENAME TO scheduling_touch_live;
ALTER TABLE scheduling_touch_live ALTER COLUMN customer_id SET (n_distinct = -0.2);
CREATE TABLE scheduling_touch (LIKE scheduling_touch_live INCLUDING DEFAULTS INCLUDING CONSTRAINTS)
    PARTITION BY LIST (state);
ALTER TABLE scheduling_touch ATTACH PARTITION scheduling_touch_live FOR VALUES IN ('scheduled', 'queued', 'running');
CREATE TABLE scheduling_touch_ended PARTITION OF scheduling_touch DEFAULT PARTITION BY RANGE (settled_at);
CREATE TABLE scheduling_touch_ended_rest PARTITION OF scheduling_touch_ended DEFAULT;
ALTER TABLE scheduling_touch_ended_rest ALTER COLUMN customer_id SET (n_distinct = -0.2);
CREATE INDEX touch_ended_task ON scheduling_touch_ended (task_id);
CREATE INDEX touch_ended_event ON scheduling_touch_ended (event_id);
CREATE INDEX touch_ended_at ON scheduling_touch_ended (settled_at, task_id);
CREATE INDEX touch_ended_history ON scheduling_touch_ended (customer_id, reserved_at) WHERE reserved_at IS NOT NULL;
CREATE INDEX touch_ended_chat_history ON scheduling_touch_ended (chat_id, reserved_at)
    WHERE reserved_at IS NOT NULL AND chat_id <> '';
CREATE INDEX touch_ended_rare ON scheduling_touch_ended (task_id, state)
    WHERE state IN ('failed', 'unknown', 'cancelled');
CREATE INDEX touch_ended_retry ON scheduling_touch_ended (retry_of) WHERE retry_of IS NOT NULL;
"""
# What the columns `verdicts` and `attempts` hold, as rows. PostgreSQL merges these functions into the calling query.
LOG_FUNCTIONS = """
CREATE FUNCTION scheduling_instant(microseconds jsonb) RETURNS timestamptz LANGUAGE sql IMMUTABLE AS $$
    SELECT timestamptz 'epoch' + CASE WHEN jsonb_typeof(microseconds) = 'number' THEN microseconds::bigint END
        * interval '1 microsecond'
$$;
CREATE FUNCTION touch_verdicts(verdicts jsonb)
RETURNS TABLE (number bigint, at timestamptz, decision text, rule text, observed text, next_eligible_at timestamptz)
LANGUAGE sql IMMUTABLE AS $$
    SELECT v.number, scheduling_instant(v.entry -> 0), v.entry ->> 1, COALESCE(v.entry ->> 2, ''),
           COALESCE(v.entry ->> 4, ''), scheduling_instant(v.entry -> 6)
    FROM jsonb_array_elements(verdicts) WITH ORDINALITY AS v(entry, number)
$$;
CREATE FUNCTION touch_attempts(attempts jsonb)
RETURNS TABLE (number int, lease_no int, started_at timestamptz, ended_at timestamptz, outcome text, subject text,
               body text)
LANGUAGE sql IMMUTABLE AS $$
    SELECT (a.entry -> 0)::int, (a.entry -> 1)::int, scheduling_instant(a.entry -> 2), scheduling_instant(a.entry -> 3),
           COALESCE(a.entry ->> 4, 'delivered'), COALESCE(a.entry ->> 8, ''), COALESCE(a.entry ->> 9, '')
    FROM jsonb_array_elements(attempts) AS a(entry)
$$;
"""

# Changes that subscriptions of outgoing webhooks may want are stored with the change, whatever code makes it. Without
# a subscription a trigger costs one look at an empty table.
WEBHOOK_FACTS = """
CREATE FUNCTION scheduling_wants_webhook(wanted text) RETURNS boolean LANGUAGE sql STABLE AS $$
    SELECT EXISTS (
        SELECT FROM scheduling_webhooksubscription WHERE enabled AND retired_at IS NULL AND events ? wanted
    )
$$;
CREATE FUNCTION scheduling_describe_failed_task(f scheduling_failedtask) RETURNS jsonb LANGUAGE sql STABLE AS $$
    SELECT jsonb_strip_nulls(jsonb_build_object(
        'id', f.id, 'origin', f.origin, 'task_id', f.task_id, 'delivery_key', f.root_id, 'failure', f.failure,
        'reason', f.reason, 'channel', f.channel, 'state', f.state, 'retried_as', f.retried_as,
        'node', f.payload -> 'node', 'platform', f.payload -> 'platform', 'shop_id', f.payload -> 'shop_id'
    ))
$$;
CREATE FUNCTION scheduling_note_opened_tasks() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    IF scheduling_wants_webhook('failed_task.opened') THEN
        INSERT INTO scheduling_webhookfact (type, object_key, at, data)
        SELECT 'failed_task.opened', 'failed_task:' || f.id, clock_timestamp(), scheduling_describe_failed_task(f)
        FROM changed AS c JOIN scheduling_failedtask AS f ON f.id = c.id WHERE c.state = 'open';
    END IF;
    RETURN NULL;
END $$;
CREATE FUNCTION scheduling_note_settled_tasks() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    IF scheduling_wants_webhook('failed_task.settled') OR scheduling_wants_webhook('failed_task.opened') THEN
        INSERT INTO scheduling_webhookfact (type, object_key, at, data)
        SELECT note.type, 'failed_task:' || f.id, clock_timestamp(), scheduling_describe_failed_task(f)
        FROM changed AS c JOIN previous AS p ON p.id = c.id AND p.state <> c.state
        JOIN scheduling_failedtask AS f ON f.id = c.id
        CROSS JOIN LATERAL ( -- an undo opens a settled task again
            SELECT CASE c.state WHEN 'open' THEN 'failed_task.opened' ELSE 'failed_task.settled' END AS type
        ) AS note
        WHERE scheduling_wants_webhook(note.type);
    END IF;
    RETURN NULL;
END $$;
CREATE FUNCTION scheduling_note_pause() RETURNS trigger LANGUAGE plpgsql AS $$
DECLARE
    kind text := split_part(COALESCE(NEW.scope, OLD.scope), ':', 1);
    name text := substr(COALESCE(NEW.scope, OLD.scope), length(kind) + 2);
BEGIN
    IF scheduling_wants_webhook('pause.changed') THEN
        INSERT INTO scheduling_webhookfact (type, object_key, at, data)
        VALUES ('pause.changed', 'pause:' || COALESCE(NEW.scope, OLD.scope), clock_timestamp(),
                jsonb_strip_nulls(jsonb_build_object(
                    'scope', COALESCE(NEW.scope, OLD.scope), 'paused', TG_OP = 'INSERT',
                    'node', CASE kind WHEN 'node' THEN name END)));
    END IF;
    RETURN NULL;
END $$;
CREATE TRIGGER webhook_opened AFTER INSERT ON scheduling_failedtask REFERENCING NEW TABLE AS changed
FOR EACH STATEMENT EXECUTE FUNCTION scheduling_note_opened_tasks();
CREATE TRIGGER webhook_settled AFTER UPDATE ON scheduling_failedtask
REFERENCING OLD TABLE AS previous NEW TABLE AS changed
FOR EACH STATEMENT EXECUTE FUNCTION scheduling_note_settled_tasks();
CREATE TRIGGER webhook_paused AFTER INSERT OR DELETE ON scheduling_pause
FOR EACH ROW EXECUTE FUNCTION scheduling_note_pause();
"""
DROP_WEBHOOK_FACTS = """
DROP FUNCTION scheduling_note_pause() CASCADE;
DROP FUNCTION scheduling_note_settled_tasks() CASCADE;
DROP FUNCTION scheduling_note_opened_tasks() CASCADE;
DROP FUNCTION scheduling_describe_failed_task(scheduling_failedtask);
DROP FUNCTION scheduling_wants_webhook(text);
"""


def create_indexes(apps, schema_editor):
    """Create now what Django creates at the end of a migration: the indexes belong to the live part only."""
    for statement in schema_editor.deferred_sql:
        schema_editor.execute(statement, None)
    schema_editor.deferred_sql.clear()


def create_partitions(apps, schema_editor):
    from scheduling.ledger import partitions

    partitions.create_partitions()


# An entry may go when a year has passed, and its texts may be emptied. A trigger also binds the role that owns the table.
APPEND_ONLY = """
CREATE FUNCTION scheduling_refuse_audit_change() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    IF TG_OP = 'DELETE' AND OLD.at < now() - interval '365 days' THEN
        RETURN OLD;
    END IF;
    -- The erasure of a customer empties texts.
    IF TG_OP = 'UPDATE'
        AND (NEW.id, NEW.at, NEW.actor, NEW.address, NEW.action, NEW.kind, NEW.object_id)
          = (OLD.id, OLD.at, OLD.actor, OLD.address, OLD.action, OLD.kind, OLD.object_id)
        AND NEW.label IN ('', OLD.label) AND NEW.reason IN ('', OLD.reason) AND NEW.changes IN ('[]', OLD.changes)
    THEN
        RETURN NEW;
    END IF;
    RAISE EXCEPTION 'entries of the audit log are not changed or deleted within a year'
        USING ERRCODE = 'integrity_constraint_violation';
END $$;
CREATE TRIGGER append_only BEFORE UPDATE OR DELETE ON scheduling_auditentry
FOR EACH ROW EXECUTE FUNCTION scheduling_refuse_audit_change();
"""
DROP_APPEND_ONLY = """
DROP TRIGGER append_only ON scheduling_auditentry;
DROP FUNCTION scheduling_refuse_audit_change();
"""


class Migration(migrations.Migration):

    initial = True

    dependencies = [
        migrations.swappable_dependency(settings.AUTH_USER_MODEL),
    ]

    operations = [
        CreateModels([
            migrations.CreateModel(
                name='AlertReceiver',
                fields=[
                    ('id', models.BigAutoField(auto_created=True, primary_key=True, serialize=False, verbose_name='ID')),
                    ('channel', models.ForeignKey(on_delete=django.db.models.deletion.PROTECT, related_name='+', to='scheduling.channelconfig', verbose_name='channel')),
                    ('community', models.ForeignKey(blank=True, null=True, on_delete=django.db.models.deletion.PROTECT, related_name='+', to='scheduling.community', verbose_name='community')),
                    ('address', models.CharField(blank=True, max_length=254, verbose_name='mail address')),
                    ('enabled', models.BooleanField(default=True, verbose_name='enabled')),
                    ('problem', models.CharField(blank=True, editable=False, max_length=500, verbose_name='problem')),
                    ('notified_at', models.DateTimeField(editable=False, null=True, verbose_name='last notified at')),
                ],
                options={
                    'verbose_name': 'alert receiver',
                    'verbose_name_plural': 'alert receivers',
                },
            ),
            migrations.CreateModel(
                name='Alert',
                fields=[
                    ('id', models.BigAutoField(auto_created=True, primary_key=True, serialize=False, verbose_name='ID')),
                    ('condition', models.CharField(max_length=40, verbose_name='condition')),
                    ('subject', models.CharField(blank=True, max_length=200, verbose_name='about')),
                    ('since', models.DateTimeField(verbose_name='since')),
                    ('value', models.FloatField(verbose_name='value')),
                    ('ended_at', models.DateTimeField(null=True, verbose_name='resolved at')),
                    ('tried', models.BooleanField(default=False)),
                    ('notified_at', models.DateTimeField(null=True, verbose_name='notified at')),
                    ('message_at', models.DateTimeField()),
                ],
                options={
                    'verbose_name': 'alert',
                    'verbose_name_plural': 'alerts',
                    'ordering': ['since', 'id'],
                    'constraints': [models.UniqueConstraint(fields=('condition', 'subject'), name='one_alert_a_subject')],
                },
            ),
            migrations.CreateModel(
                name='ApiKey',
                fields=[
                    ('id', models.BigAutoField(auto_created=True, primary_key=True, serialize=False, verbose_name='ID')),
                    ('name', models.CharField(max_length=100, unique=True, verbose_name='name')),
                    ('digest', models.CharField(editable=False, max_length=64, unique=True)),
                    ('prefix', models.CharField(editable=False, max_length=12, verbose_name='prefix')),
                    ('scopes', models.JSONField(default=list, verbose_name='scopes')),
                    ('rate_per_minute', models.PositiveIntegerField(blank=True, null=True, verbose_name='requests per minute')),
                    ('created_at', models.DateTimeField(default=django.utils.timezone.now, editable=False, verbose_name='created at')),
                    ('expires_at', models.DateTimeField(blank=True, null=True, verbose_name='expires at')),
                    ('revoked_at', models.DateTimeField(blank=True, null=True, verbose_name='revoked at')),
                ],
                options={
                    'verbose_name': 'API key',
                    'verbose_name_plural': 'API keys',
                    'ordering': ['name'],
                },
            ),
            migrations.CreateModel(
                name='Pause',
                fields=[
                    ('id', models.BigAutoField(auto_created=True, primary_key=True, serialize=False, verbose_name='ID')),
                    ('scope', models.CharField(max_length=120, unique=True, verbose_name='scope')),
                    ('reason', models.CharField(blank=True, max_length=200, verbose_name='reason')),
                    ('paused_by', models.ForeignKey(null=True, on_delete=django.db.models.deletion.SET_NULL, to=settings.AUTH_USER_MODEL, verbose_name='paused by')),
                    ('paused_at', models.DateTimeField(default=django.utils.timezone.now, editable=False, verbose_name='paused at')),
                ],
                options={
                    'verbose_name': 'pause',
                    'verbose_name_plural': 'pauses',
                },
            ),
            migrations.CreateModel(
                name='FailedLogin',
                fields=[
                    ('id', models.BigAutoField(auto_created=True, primary_key=True, serialize=False, verbose_name='ID')),
                    ('digest', models.CharField(editable=False, max_length=64)),
                    ('address', models.CharField(editable=False, max_length=45, verbose_name='address')),
                    ('user', models.ForeignKey(editable=False, null=True, on_delete=django.db.models.deletion.CASCADE, to=settings.AUTH_USER_MODEL, verbose_name='user')),
                    ('tries', models.PositiveIntegerField(editable=False, verbose_name='failed attempts')),
                    ('last_at', models.DateTimeField(db_index=True, editable=False, verbose_name='last attempt')),
                    ('succeeded_at', models.DateTimeField(editable=False, null=True)),
                ],
                options={
                    'verbose_name': 'failed login',
                    'verbose_name_plural': 'failed logins',
                    'ordering': ['-last_at'],
                    'constraints': [models.UniqueConstraint(fields=('digest', 'address'), name='failed_login_once')],
                },
            ),
            migrations.CreateModel(
                name='AuditEntry',
                fields=[
                    ('id', models.UUIDField(default=scheduling.ids.new_id, editable=False, primary_key=True, serialize=False)),
                    ('at', models.DateTimeField(db_default=django.db.models.functions.datetime.Now(), editable=False, verbose_name='at')),
                    ('actor', models.CharField(blank=True, max_length=150, verbose_name='who')),
                    ('address', models.CharField(blank=True, max_length=45, verbose_name='address')),
                    ('action', models.CharField(choices=[('added', 'Added'), ('changed', 'Changed'), ('deleted', 'Deleted'), ('acted', 'Acted'), ('logged_in', 'Signed in'), ('logged_out', 'Signed out'), ('login_failed', 'Failed sign-in'), ('paused', 'Paused'), ('resumed', 'Resumed'), ('cancelled', 'Cancelled'), ('published', 'Published'), ('discarded', 'Discarded'), ('retried', 'Retried'), ('resolved', 'Resolved'), ('ignored', 'Ignored'), ('archived', 'Archived'), ('started', 'Started'), ('ended', 'Ended'), ('exported', 'Exported'), ('erased', 'Erased'), ('undone', 'Undone')], max_length=20, verbose_name='action')),
                    ('kind', models.CharField(max_length=60, verbose_name='kind')),
                    ('object_id', models.CharField(max_length=100)),
                    ('label', models.CharField(blank=True, max_length=200, verbose_name='object')),
                    ('reason', models.CharField(blank=True, max_length=500, verbose_name='reason')),
                    ('changes', models.JSONField(default=list, verbose_name='changes')),
                ],
                options={
                    'verbose_name': 'audit entry',
                    'verbose_name_plural': 'audit log',
                    'ordering': ['-id'],
                    'default_permissions': ('view',),
                    'indexes': [models.Index(fields=['kind', 'object_id', 'id'], name='audit_object'), models.Index(fields=['actor', 'id'], name='audit_actor')],
                },
            ),
            migrations.CreateModel(
                name='BulkAction',
                fields=[
                    ('id', models.UUIDField(default=scheduling.ids.new_id, editable=False, primary_key=True, serialize=False)),
                    ('action', models.CharField(max_length=20, verbose_name='action')),
                    ('filter', models.JSONField(default=dict, verbose_name='filter')),
                    ('given', models.JSONField(default=dict, verbose_name='parameters')),
                    ('keys', django.contrib.postgres.fields.ArrayField(base_field=models.UUIDField(), default=list, size=None)),
                    ('states', django.contrib.postgres.fields.ArrayField(base_field=models.CharField(max_length=20), default=list, size=None)),
                    ('actor', models.ForeignKey(null=True, on_delete=django.db.models.deletion.SET_NULL, related_name='+', to=settings.AUTH_USER_MODEL, verbose_name='who')),
                    ('actor_name', models.CharField(max_length=150, verbose_name='who')),
                    ('reason', models.CharField(blank=True, max_length=500, verbose_name='reason')),
                    ('per_second', models.FloatField(verbose_name='rate per second')),
                    ('state', models.CharField(choices=[('running', 'Under way'), ('done', 'Done'), ('cancelled', 'Cancelled'), ('failed', 'Failed')], default='running', max_length=10, verbose_name='state')),
                    ('begun_at', models.DateTimeField(default=django.utils.timezone.now, verbose_name='started at')),
                    ('ended_at', models.DateTimeField(null=True, verbose_name='ended at')),
                    ('ended_by', models.CharField(blank=True, max_length=150, verbose_name='ended by')),
                    ('total', models.PositiveIntegerField(default=0, verbose_name='rows')),
                    ('done', models.PositiveIntegerField(default=0, verbose_name='done')),
                    ('skipped', models.PositiveIntegerField(default=0, verbose_name='skipped')),
                    ('failed', models.PositiveIntegerField(default=0, verbose_name='could not be done')),
                    ('next_at', models.DateTimeField(default=django.utils.timezone.now)),
                    ('tries', models.PositiveSmallIntegerField(default=0)),
                    ('retry_at', models.DateTimeField(default=django.utils.timezone.now)),
                    ('note', models.TextField(blank=True, verbose_name='note')),
                ],
                options={
                    'verbose_name': 'bulk action',
                    'verbose_name_plural': 'bulk actions',
                    'ordering': ['-id'],
                    'default_permissions': ('view',),
                    'indexes': [models.Index(condition=models.Q(('state', 'running')), fields=['next_at'], name='bulk_due')],
                },
            ),
            migrations.CreateModel(
                name='UndoableAct',
                fields=[
                    ('id', models.UUIDField(default=scheduling.ids.new_id, editable=False, primary_key=True, serialize=False)),
                    ('owner', models.ForeignKey(on_delete=django.db.models.deletion.CASCADE, related_name='+', to=settings.AUTH_USER_MODEL)),
                    ('act', models.CharField(max_length=20)),
                    ('label', models.CharField(blank=True, max_length=200)),
                    ('keys', models.JSONField(default=list)),
                    ('given', models.JSONField(default=dict)),
                    ('made_at', models.DateTimeField(db_default=django.db.models.functions.datetime.Now(), db_index=True)),
                ],
                options={
                    'verbose_name': 'undoable act',
                    'verbose_name_plural': 'undoable acts',
                    'default_permissions': (),
                },
            ),
            migrations.CreateModel(
                name='DismissedChecklist',
                fields=[
                    ('user', models.OneToOneField(on_delete=django.db.models.deletion.CASCADE, primary_key=True, related_name='+', serialize=False, to=settings.AUTH_USER_MODEL)),
                ],
                options={
                    'verbose_name': 'dismissed checklist',
                    'verbose_name_plural': 'dismissed checklists',
                    'default_permissions': (),
                },
            ),
            migrations.CreateModel(
                name='Configuration',
                fields=[
                    ('id', models.BigAutoField(auto_created=True, primary_key=True, serialize=False, verbose_name='ID')),
                    ('version', models.BigIntegerField(default=1)),
                    ('changed_at', models.DateTimeField(auto_now=True)),
                ],
            ),
            migrations.CreateModel(
                name='Stage',
                fields=[
                    ('id', models.BigAutoField(auto_created=True, primary_key=True, serialize=False, verbose_name='ID')),
                    ('key', models.CharField(max_length=64, unique=True, validators=[scheduling.models.versioned.Bound(scheduling.errors.check_key)], verbose_name='key')),
                    ('name', models.CharField(blank=True, max_length=100, verbose_name='name')),
                    ('position', models.PositiveSmallIntegerField(default=0, validators=[scheduling.models.versioned.Bound(scheduling.errors.check_number, least=0, most=32767)], verbose_name='position')),
                    ('retired_at', models.DateTimeField(blank=True, editable=False, null=True, verbose_name='retired at')),
                ],
                options={
                    'verbose_name': 'stage',
                    'verbose_name_plural': 'stages',
                    'ordering': ['position', 'key'],
                },
            ),
            migrations.CreateModel(
                name='HistoricalTemplate',
                fields=[
                    ('id', models.BigIntegerField(auto_created=True, blank=True, db_index=True, verbose_name='ID')),
                    ('version', models.PositiveIntegerField(default=1, editable=False, verbose_name='version')),
                    ('key', models.CharField(db_index=True, max_length=64, validators=[scheduling.models.versioned.Bound(scheduling.errors.check_key)], verbose_name='key')),
                    ('content_type', models.CharField(help_text='The same type is not sent twice within the dedupe window.', max_length=64, verbose_name='content type')),
                    ('category', models.CharField(choices=[('marketing', 'Marketing (blocked by opt-out)'), ('service', 'Service')], default='marketing', max_length=10, verbose_name='category')),
                    ('tracks_links', models.BooleanField(default=True, verbose_name='count clicks on links')),
                    ('retired_at', models.DateTimeField(blank=True, editable=False, null=True, verbose_name='retired at')),
                    ('history_id', models.AutoField(primary_key=True, serialize=False)),
                    ('history_date', models.DateTimeField(db_index=True)),
                    ('history_change_reason', models.CharField(max_length=100, null=True)),
                    ('history_type', models.CharField(choices=[('+', 'Created'), ('~', 'Changed'), ('-', 'Deleted')], max_length=1)),
                    ('history_user', models.ForeignKey(null=True, on_delete=django.db.models.deletion.SET_NULL, related_name='+', to=settings.AUTH_USER_MODEL)),
                ],
                options={
                    'verbose_name': 'historical template',
                    'verbose_name_plural': 'historical templates',
                    'ordering': ('-history_date', '-history_id'),
                    'get_latest_by': ('history_date', 'history_id'),
                },
                bases=(simple_history.models.HistoricalChanges, models.Model),
            ),
            migrations.CreateModel(
                name='Template',
                fields=[
                    ('id', models.BigAutoField(auto_created=True, primary_key=True, serialize=False, verbose_name='ID')),
                    ('version', models.PositiveIntegerField(default=1, editable=False, verbose_name='version')),
                    ('key', models.CharField(max_length=64, unique=True, validators=[scheduling.models.versioned.Bound(scheduling.errors.check_key)], verbose_name='key')),
                    ('content_type', models.CharField(help_text='The same type is not sent twice within the dedupe window.', max_length=64, verbose_name='content type')),
                    ('category', models.CharField(choices=[('marketing', 'Marketing (blocked by opt-out)'), ('service', 'Service')], default='marketing', max_length=10, verbose_name='category')),
                    ('tracks_links', models.BooleanField(default=True, verbose_name='count clicks on links')),
                    ('retired_at', models.DateTimeField(blank=True, editable=False, null=True, verbose_name='retired at')),
                ],
                options={
                    'verbose_name': 'template',
                    'verbose_name_plural': 'templates',
                    'ordering': ['key'],
                },
            ),
            migrations.CreateModel(
                name='HistoricalTemplateText',
                fields=[
                    ('id', models.BigIntegerField(auto_created=True, blank=True, db_index=True, verbose_name='ID')),
                    ('locale', models.CharField(default='zh-hans', max_length=20, verbose_name='locale')),
                    ('subject', models.CharField(blank=True, max_length=200, verbose_name='subject')),
                    ('body', models.TextField(verbose_name='body')),
                    ('template', models.ForeignKey(blank=True, db_constraint=False, null=True, on_delete=django.db.models.deletion.DO_NOTHING, related_name='+', to='scheduling.template', verbose_name='template')),
                    ('history_id', models.AutoField(primary_key=True, serialize=False)),
                    ('history_date', models.DateTimeField(db_index=True)),
                    ('history_change_reason', models.CharField(max_length=100, null=True)),
                    ('history_type', models.CharField(choices=[('+', 'Created'), ('~', 'Changed'), ('-', 'Deleted')], max_length=1)),
                    ('history_user', models.ForeignKey(null=True, on_delete=django.db.models.deletion.SET_NULL, related_name='+', to=settings.AUTH_USER_MODEL)),
                ],
                options={
                    'verbose_name': 'historical text',
                    'verbose_name_plural': 'historical texts',
                    'ordering': ('-history_date', '-history_id'),
                    'get_latest_by': ('history_date', 'history_id'),
                },
                bases=(simple_history.models.HistoricalChanges, models.Model),
            ),
            migrations.CreateModel(
                name='TemplateText',
                fields=[
                    ('id', models.BigAutoField(auto_created=True, primary_key=True, serialize=False, verbose_name='ID')),
                    ('template', models.ForeignKey(on_delete=django.db.models.deletion.CASCADE, related_name='texts', to='scheduling.template', verbose_name='template')),
                    ('locale', models.CharField(default='zh-hans', max_length=20, verbose_name='locale')),
                    ('subject', models.CharField(blank=True, max_length=200, verbose_name='subject')),
                    ('body', models.TextField(verbose_name='body')),
                ],
                options={
                    'verbose_name': 'text',
                    'verbose_name_plural': 'texts',
                    'ordering': ['locale'],
                    'constraints': [models.UniqueConstraint(fields=('template', 'locale'), name='one_text_a_locale')],
                },
            ),
            migrations.CreateModel(
                name='HistoricalChannelConfig',
                fields=[
                    ('id', models.BigIntegerField(auto_created=True, blank=True, db_index=True, verbose_name='ID')),
                    ('version', models.PositiveIntegerField(default=1, editable=False, verbose_name='version')),
                    ('key', models.CharField(db_index=True, max_length=64, validators=[scheduling.models.versioned.Bound(scheduling.errors.check_key)], verbose_name='key')),
                    ('name', models.CharField(blank=True, db_default='', default='', max_length=100, verbose_name='name')),
                    ('kind', models.CharField(max_length=40, verbose_name='kind')),
                    ('idempotent', models.BooleanField(default=False, help_text='A repeat with the same delivery key has no second effect, so an unknown outcome may be retried.', verbose_name='idempotent')),
                    ('timeout', models.DurationField(default=datetime.timedelta(seconds=10), validators=[scheduling.models.versioned.Bound(scheduling.errors.check_span, least=datetime.timedelta(microseconds=1), most=datetime.timedelta(seconds=20))], verbose_name='timeout')),
                    ('retry_delays', models.JSONField(blank=True, default=list, validators=[scheduling.models.versioned.Bound(scheduling.errors.check_retry_delays)], verbose_name='retry delays in seconds')),
                    ('daily_limit', models.PositiveIntegerField(blank=True, null=True, validators=[scheduling.models.versioned.Bound(scheduling.errors.check_number, least=1, most=1000000)], verbose_name='messages a day')),
                    ('monthly_limit', models.PositiveIntegerField(blank=True, null=True, validators=[scheduling.models.versioned.Bound(scheduling.errors.check_number, least=1, most=1000000)], verbose_name='messages a month')),
                    ('retired_at', models.DateTimeField(blank=True, editable=False, null=True, verbose_name='retired at')),
                    ('history_id', models.AutoField(primary_key=True, serialize=False)),
                    ('history_date', models.DateTimeField(db_index=True)),
                    ('history_change_reason', models.CharField(max_length=100, null=True)),
                    ('history_type', models.CharField(choices=[('+', 'Created'), ('~', 'Changed'), ('-', 'Deleted')], max_length=1)),
                    ('history_user', models.ForeignKey(null=True, on_delete=django.db.models.deletion.SET_NULL, related_name='+', to=settings.AUTH_USER_MODEL)),
                ],
                options={
                    'verbose_name': 'historical channel',
                    'verbose_name_plural': 'historical channels',
                    'ordering': ('-history_date', '-history_id'),
                    'get_latest_by': ('history_date', 'history_id'),
                },
                bases=(simple_history.models.HistoricalChanges, models.Model),
            ),
            migrations.CreateModel(
                name='ChannelConfig',
                fields=[
                    ('id', models.BigAutoField(auto_created=True, primary_key=True, serialize=False, verbose_name='ID')),
                    ('version', models.PositiveIntegerField(default=1, editable=False, verbose_name='version')),
                    ('key', models.CharField(max_length=64, unique=True, validators=[scheduling.models.versioned.Bound(scheduling.errors.check_key)], verbose_name='key')),
                    ('name', models.CharField(blank=True, db_default='', default='', max_length=100, verbose_name='name')),
                    ('kind', models.CharField(max_length=40, verbose_name='kind')),
                    ('config', scheduling.models.encrypted.EncryptedJSONField(blank=True, default=dict, verbose_name='settings')),
                    ('idempotent', models.BooleanField(default=False, help_text='A repeat with the same delivery key has no second effect, so an unknown outcome may be retried.', verbose_name='idempotent')),
                    ('timeout', models.DurationField(default=datetime.timedelta(seconds=10), validators=[scheduling.models.versioned.Bound(scheduling.errors.check_span, least=datetime.timedelta(microseconds=1), most=datetime.timedelta(seconds=20))], verbose_name='timeout')),
                    ('retry_delays', models.JSONField(blank=True, default=list, validators=[scheduling.models.versioned.Bound(scheduling.errors.check_retry_delays)], verbose_name='retry delays in seconds')),
                    ('daily_limit', models.PositiveIntegerField(blank=True, null=True, validators=[scheduling.models.versioned.Bound(scheduling.errors.check_number, least=1, most=1000000)], verbose_name='messages a day')),
                    ('monthly_limit', models.PositiveIntegerField(blank=True, null=True, validators=[scheduling.models.versioned.Bound(scheduling.errors.check_number, least=1, most=1000000)], verbose_name='messages a month')),
                    ('retired_at', models.DateTimeField(blank=True, editable=False, null=True, verbose_name='retired at')),
                ],
                options={
                    'verbose_name': 'channel',
                    'verbose_name_plural': 'channels',
                    'ordering': ['key'],
                },
            ),
            migrations.CreateModel(
                name='DisabledTarget',
                fields=[
                    ('id', models.BigAutoField(auto_created=True, primary_key=True, serialize=False, verbose_name='ID')),
                    ('channel', models.ForeignKey(on_delete=django.db.models.deletion.CASCADE, to='scheduling.channelconfig', verbose_name='channel')),
                    ('target_digest', models.CharField(help_text='SHA-256 of the address', max_length=64, verbose_name='target')),
                    ('chat_id', models.CharField(blank=True, max_length=200, verbose_name='chat id')),
                    ('reason', models.CharField(blank=True, max_length=200, verbose_name='reason')),
                    ('disabled_at', models.DateTimeField(auto_now_add=True, verbose_name='disabled at')),
                ],
                options={
                    'verbose_name': 'disabled target',
                    'verbose_name_plural': 'disabled targets',
                    'indexes': [models.Index(fields=['disabled_at'], name='disabled_since'), models.Index(fields=['target_digest'], name='disabled_address')],
                    'constraints': [models.UniqueConstraint(fields=('channel', 'target_digest'), name='disabled_once')],
                },
            ),
            migrations.CreateModel(
                name='HistoricalNode',
                fields=[
                    ('id', models.BigIntegerField(auto_created=True, blank=True, db_index=True, verbose_name='ID')),
                    ('version', models.PositiveIntegerField(default=1, editable=False, verbose_name='version')),
                    ('key', models.CharField(db_index=True, max_length=64, validators=[scheduling.models.versioned.Bound(scheduling.errors.check_key)], verbose_name='key')),
                    ('name', models.CharField(blank=True, db_default='', default='', max_length=100, verbose_name='name')),
                    ('trigger', models.CharField(max_length=120, verbose_name='trigger event')),
                    ('from_nodes', models.JSONField(blank=True, default=list, validators=[scheduling.models.versioned.Bound(scheduling.errors.check_texts, longest=64)], verbose_name='follows these nodes')),
                    ('delay', models.DurationField(default=datetime.timedelta(0), validators=[scheduling.models.versioned.Bound(scheduling.errors.check_span)], verbose_name='delay')),
                    ('dynamic', models.BooleanField(default=False, verbose_name='dynamic delay')),
                    ('delay_rules', models.JSONField(blank=True, null=True, verbose_name='own delay rules')),
                    ('priority', models.SmallIntegerField(choices=[(0, 'High'), (1, 'Normal'), (2, 'Low')], default=1, verbose_name='priority')),
                    ('enabled', models.BooleanField(default=True, verbose_name='enabled')),
                    ('rollout_percent', models.FloatField(default=100, validators=[scheduling.models.versioned.Bound(scheduling.errors.check_number, least=0, most=100)], verbose_name='rollout, percent of communities')),
                    ('rollout_communities', models.JSONField(blank=True, default=list, validators=[scheduling.models.versioned.Bound(scheduling.errors.check_texts, longest=200)], verbose_name='rollout, always these communities')),
                    ('over_cap', models.CharField(choices=[('suppress', 'Suppress'), ('defer', 'Defer to the next eligible time')], default='suppress', max_length=10, verbose_name='over the cap')),
                    ('expires_after', models.DurationField(default=datetime.timedelta(days=3), validators=[scheduling.models.versioned.Bound(scheduling.errors.check_span, least=datetime.timedelta(microseconds=1))], verbose_name='expires after')),
                    ('canary_percent', models.FloatField(default=0, validators=[scheduling.models.versioned.Bound(scheduling.errors.check_number, least=0, most=100)], verbose_name='canary, percent of communities')),
                    ('canary_communities', models.JSONField(blank=True, default=list, validators=[scheduling.models.versioned.Bound(scheduling.errors.check_texts, longest=200)], verbose_name='canary, always these communities')),
                    ('canary_guard', models.JSONField(blank=True, null=True, verbose_name='canary, plan of an automatic roll-out')),
                    ('cancel_on', models.JSONField(blank=True, default=list, validators=[scheduling.models.versioned.Bound(scheduling.errors.check_texts, longest=120)], verbose_name='cancelled by these events')),
                    ('on_repeat', models.CharField(choices=[('each', 'Each event counts'), ('keep', 'Keep the one that waits'), ('restart', 'Restart the wait')], default='each', max_length=10, verbose_name='on repetition')),
                    ('goal_event', models.CharField(blank=True, max_length=120, verbose_name='goal event')),
                    ('goal_within', models.DurationField(blank=True, null=True, validators=[scheduling.models.versioned.Bound(scheduling.errors.check_span, least=datetime.timedelta(microseconds=1))], verbose_name='goal within')),
                    ('holdout_percent', models.FloatField(default=0, validators=[scheduling.models.versioned.Bound(scheduling.errors.check_number, least=0, most=100)], verbose_name='hold-out, percent of customers')),
                    ('guard_cap', models.CharField(choices=[('apply', 'Apply'), ('count_only', 'Send anyway, but count it'), ('ignore', 'Ignore')], default='apply', max_length=10, verbose_name='cap')),
                    ('guard_dedupe', models.CharField(choices=[('apply', 'Apply'), ('ignore', 'Ignore')], default='apply', max_length=10, verbose_name='same content')),
                    ('guard_conversation', models.CharField(choices=[('apply', 'Apply'), ('ignore', 'Ignore')], default='apply', max_length=10, verbose_name='live conversation')),
                    ('guard_quiet_hours', models.CharField(choices=[('apply', 'Apply'), ('ignore', 'Ignore')], default='apply', max_length=10, verbose_name='quiet hours')),
                    ('guard_holdout', models.CharField(choices=[('apply', 'Apply'), ('ignore', 'Ignore')], default='apply', max_length=10, verbose_name='global hold-out')),
                    ('tags', models.JSONField(blank=True, default=list, validators=[scheduling.models.versioned.Bound(scheduling.errors.check_texts, longest=64)], verbose_name='tags')),
                    ('when', models.JSONField(blank=True, null=True, verbose_name='conditions')),
                    ('variants', models.JSONField(blank=True, default=list, verbose_name='content variants')),
                    ('at', models.TimeField(blank=True, null=True, verbose_name='at this time')),
                    ('at_day', models.CharField(choices=[('any', 'The first day that has this time left'), ('next', 'The next day'), ('working', 'The first working day that has this time left'), ('next_working', 'The next working day')], default='any', max_length=12, verbose_name='on this day')),
                    ('not_before', models.TimeField(blank=True, null=True, verbose_name='not before')),
                    ('send_window', models.JSONField(blank=True, null=True, verbose_name='send windows')),
                    ('retired_at', models.DateTimeField(blank=True, editable=False, null=True, verbose_name='retired at')),
                    ('stage', models.ForeignKey(blank=True, db_constraint=False, null=True, on_delete=django.db.models.deletion.DO_NOTHING, related_name='+', to='scheduling.stage', verbose_name='stage')),
                    ('template', models.ForeignKey(blank=True, db_constraint=False, null=True, on_delete=django.db.models.deletion.DO_NOTHING, related_name='+', to='scheduling.template', verbose_name='template')),
                    ('channel', models.ForeignKey(blank=True, db_constraint=False, null=True, on_delete=django.db.models.deletion.DO_NOTHING, related_name='+', to='scheduling.channelconfig', verbose_name='channel')),
                    ('canary_template', models.ForeignKey(blank=True, db_constraint=False, null=True, on_delete=django.db.models.deletion.DO_NOTHING, related_name='+', to='scheduling.template', verbose_name='canary template')),
                    ('history_id', models.AutoField(primary_key=True, serialize=False)),
                    ('history_date', models.DateTimeField(db_index=True)),
                    ('history_change_reason', models.CharField(max_length=100, null=True)),
                    ('history_type', models.CharField(choices=[('+', 'Created'), ('~', 'Changed'), ('-', 'Deleted')], max_length=1)),
                    ('history_user', models.ForeignKey(null=True, on_delete=django.db.models.deletion.SET_NULL, related_name='+', to=settings.AUTH_USER_MODEL)),
                ],
                options={
                    'verbose_name': 'historical service node',
                    'verbose_name_plural': 'historical service nodes',
                    'ordering': ('-history_date', '-history_id'),
                    'get_latest_by': ('history_date', 'history_id'),
                },
                bases=(simple_history.models.HistoricalChanges, models.Model),
            ),
            migrations.CreateModel(
                name='Node',
                fields=[
                    ('id', models.BigAutoField(auto_created=True, primary_key=True, serialize=False, verbose_name='ID')),
                    ('version', models.PositiveIntegerField(default=1, editable=False, verbose_name='version')),
                    ('key', models.CharField(max_length=64, unique=True, validators=[scheduling.models.versioned.Bound(scheduling.errors.check_key)], verbose_name='key')),
                    ('name', models.CharField(blank=True, db_default='', default='', max_length=100, verbose_name='name')),
                    ('stage', models.ForeignKey(on_delete=django.db.models.deletion.PROTECT, related_name='nodes', to='scheduling.stage', verbose_name='stage')),
                    ('trigger', models.CharField(max_length=120, verbose_name='trigger event')),
                    ('from_nodes', models.JSONField(blank=True, default=list, validators=[scheduling.models.versioned.Bound(scheduling.errors.check_texts, longest=64)], verbose_name='follows these nodes')),
                    ('delay', models.DurationField(default=datetime.timedelta(0), validators=[scheduling.models.versioned.Bound(scheduling.errors.check_span)], verbose_name='delay')),
                    ('dynamic', models.BooleanField(default=False, verbose_name='dynamic delay')),
                    ('delay_rules', models.JSONField(blank=True, null=True, verbose_name='own delay rules')),
                    ('template', models.ForeignKey(on_delete=django.db.models.deletion.PROTECT, related_name='nodes', to='scheduling.template', verbose_name='template')),
                    ('channel', models.ForeignKey(on_delete=django.db.models.deletion.PROTECT, related_name='nodes', to='scheduling.channelconfig', verbose_name='channel')),
                    ('priority', models.SmallIntegerField(choices=[(0, 'High'), (1, 'Normal'), (2, 'Low')], default=1, verbose_name='priority')),
                    ('enabled', models.BooleanField(default=True, verbose_name='enabled')),
                    ('rollout_percent', models.FloatField(default=100, validators=[scheduling.models.versioned.Bound(scheduling.errors.check_number, least=0, most=100)], verbose_name='rollout, percent of communities')),
                    ('rollout_communities', models.JSONField(blank=True, default=list, validators=[scheduling.models.versioned.Bound(scheduling.errors.check_texts, longest=200)], verbose_name='rollout, always these communities')),
                    ('over_cap', models.CharField(choices=[('suppress', 'Suppress'), ('defer', 'Defer to the next eligible time')], default='suppress', max_length=10, verbose_name='over the cap')),
                    ('expires_after', models.DurationField(default=datetime.timedelta(days=3), validators=[scheduling.models.versioned.Bound(scheduling.errors.check_span, least=datetime.timedelta(microseconds=1))], verbose_name='expires after')),
                    ('canary_template', models.ForeignKey(blank=True, null=True, on_delete=django.db.models.deletion.PROTECT, related_name='canary_nodes', to='scheduling.template', verbose_name='canary template')),
                    ('canary_percent', models.FloatField(default=0, validators=[scheduling.models.versioned.Bound(scheduling.errors.check_number, least=0, most=100)], verbose_name='canary, percent of communities')),
                    ('canary_communities', models.JSONField(blank=True, default=list, validators=[scheduling.models.versioned.Bound(scheduling.errors.check_texts, longest=200)], verbose_name='canary, always these communities')),
                    ('canary_guard', models.JSONField(blank=True, null=True, verbose_name='canary, plan of an automatic roll-out')),
                    ('cancel_on', models.JSONField(blank=True, default=list, validators=[scheduling.models.versioned.Bound(scheduling.errors.check_texts, longest=120)], verbose_name='cancelled by these events')),
                    ('on_repeat', models.CharField(choices=[('each', 'Each event counts'), ('keep', 'Keep the one that waits'), ('restart', 'Restart the wait')], default='each', max_length=10, verbose_name='on repetition')),
                    ('goal_event', models.CharField(blank=True, max_length=120, verbose_name='goal event')),
                    ('goal_within', models.DurationField(blank=True, null=True, validators=[scheduling.models.versioned.Bound(scheduling.errors.check_span, least=datetime.timedelta(microseconds=1))], verbose_name='goal within')),
                    ('holdout_percent', models.FloatField(default=0, validators=[scheduling.models.versioned.Bound(scheduling.errors.check_number, least=0, most=100)], verbose_name='hold-out, percent of customers')),
                    ('guard_cap', models.CharField(choices=[('apply', 'Apply'), ('count_only', 'Send anyway, but count it'), ('ignore', 'Ignore')], default='apply', max_length=10, verbose_name='cap')),
                    ('guard_dedupe', models.CharField(choices=[('apply', 'Apply'), ('ignore', 'Ignore')], default='apply', max_length=10, verbose_name='same content')),
                    ('guard_conversation', models.CharField(choices=[('apply', 'Apply'), ('ignore', 'Ignore')], default='apply', max_length=10, verbose_name='live conversation')),
                    ('guard_quiet_hours', models.CharField(choices=[('apply', 'Apply'), ('ignore', 'Ignore')], default='apply', max_length=10, verbose_name='quiet hours')),
                    ('guard_holdout', models.CharField(choices=[('apply', 'Apply'), ('ignore', 'Ignore')], default='apply', max_length=10, verbose_name='global hold-out')),
                    ('tags', models.JSONField(blank=True, default=list, validators=[scheduling.models.versioned.Bound(scheduling.errors.check_texts, longest=64)], verbose_name='tags')),
                    ('when', models.JSONField(blank=True, null=True, verbose_name='conditions')),
                    ('variants', models.JSONField(blank=True, default=list, verbose_name='content variants')),
                    ('at', models.TimeField(blank=True, null=True, verbose_name='at this time')),
                    ('at_day', models.CharField(choices=[('any', 'The first day that has this time left'), ('next', 'The next day'), ('working', 'The first working day that has this time left'), ('next_working', 'The next working day')], default='any', max_length=12, verbose_name='on this day')),
                    ('not_before', models.TimeField(blank=True, null=True, verbose_name='not before')),
                    ('send_window', models.JSONField(blank=True, null=True, verbose_name='send windows')),
                    ('retired_at', models.DateTimeField(blank=True, editable=False, null=True, verbose_name='retired at')),
                ],
                options={
                    'verbose_name': 'service node',
                    'verbose_name_plural': 'service nodes',
                    'ordering': ['stage__position', 'trigger', 'key'],
                },
            ),
            migrations.CreateModel(
                name='Customer',
                fields=[
                    ('id', models.BigAutoField(auto_created=True, primary_key=True, serialize=False, verbose_name='ID')),
                    ('user_id', models.CharField(max_length=200, unique=True, verbose_name='user id')),
                    ('name', models.CharField(blank=True, max_length=200, verbose_name='name')),
                    ('level', models.CharField(blank=True, max_length=40, verbose_name='level')),
                    ('locale', models.CharField(blank=True, max_length=20, verbose_name='locale')),
                    ('timezone', models.CharField(blank=True, max_length=60, verbose_name='time zone')),
                    ('addresses', models.JSONField(blank=True, default=dict, verbose_name='addresses')),
                    ('opted_out', models.BooleanField(default=False, verbose_name='opted out of marketing')),
                    ('opted_out_at', models.DateTimeField(blank=True, null=True, verbose_name='opted out at')),
                    ('objected_at', models.DateTimeField(blank=True, null=True, verbose_name='objected at')),
                    ('consent', models.JSONField(blank=True, db_default=models.Value({}, models.JSONField()), default=dict, verbose_name='consent')),
                    ('last_active_at', models.DateTimeField(blank=True, null=True, verbose_name='last active at')),
                    ('conversation_at', models.DateTimeField(blank=True, null=True, verbose_name='conversation at')),
                    ('inactive_since', models.DateTimeField(blank=True, null=True, verbose_name='inactive since')),
                    ('created_at', models.DateTimeField(default=django.utils.timezone.now, editable=False, verbose_name='created at')),
                ],
                options={
                    'verbose_name': 'customer',
                    'verbose_name_plural': 'customers',
                    'indexes': [models.Index(condition=models.Q(('last_active_at__isnull', False), models.Q(('inactive_since__isnull', True), models.Q(('inactive_since', models.F('last_active_at')), _negated=True), _connector='OR')), fields=['last_active_at'], name='customer_present'), models.Index(condition=models.Q(('opted_out', True)), fields=['opted_out_at'], name='customer_opted_out'), models.Index(django.db.models.fields.json.KeyTextTransform('wecom_app', 'addresses'), condition=models.Q(('addresses__has_key', 'wecom_app')), name='customer_wecom_app'), models.Index(django.db.models.fields.json.KeyTextTransform('wechat_kf', 'addresses'), condition=models.Q(('addresses__has_key', 'wechat_kf')), name='customer_wechat_kf'), models.Index(django.db.models.fields.json.KeyTextTransform('wechat_official', 'addresses'), condition=models.Q(('addresses__has_key', 'wechat_official')), name='customer_wechat_official')],
                },
            ),
            migrations.CreateModel(
                name='CustomerProfile',
                fields=[
                    ('customer', models.OneToOneField(on_delete=django.db.models.deletion.CASCADE, primary_key=True, related_name='profile', serialize=False, to='scheduling.customer', verbose_name='customer')),
                    ('attributes', models.JSONField(blank=True, default=dict, verbose_name='attributes')),
                    ('tags', django.contrib.postgres.fields.ArrayField(base_field=models.CharField(max_length=64), blank=True, default=list, size=None, verbose_name='tags')),
                    ('name', models.CharField(blank=True, editable=False, max_length=200, verbose_name='name')),
                ],
                options={
                    'verbose_name': 'customer profile',
                    'verbose_name_plural': 'customer profiles',
                    'indexes': [django.contrib.postgres.indexes.GinIndex(fields=['tags'], name='customer_tags')],
                },
            ),
            migrations.CreateModel(
                name='CustomerChange',
                fields=[
                    ('id', models.UUIDField(default=scheduling.ids.new_id, editable=False, primary_key=True, serialize=False)),
                    ('customer', models.ForeignKey(db_index=False, on_delete=django.db.models.deletion.CASCADE, related_name='changes', to='scheduling.customer', verbose_name='customer')),
                    ('at', models.DateTimeField(default=django.utils.timezone.now, verbose_name='at')),
                    ('actor', models.CharField(max_length=160, verbose_name='who')),
                    ('created', models.BooleanField(default=False, verbose_name='created')),
                    ('before', models.JSONField(default=dict, verbose_name='before')),
                    ('after', models.JSONField(default=dict, verbose_name='after')),
                ],
                options={
                    'verbose_name': 'change of a customer',
                    'verbose_name_plural': 'changes of customers',
                    'indexes': [models.Index(fields=['customer', '-id'], name='customer_history')],
                },
            ),
            migrations.CreateModel(
                name='CustomerErasure',
                fields=[
                    ('id', models.UUIDField(default=scheduling.ids.new_id, editable=False, primary_key=True, serialize=False)),
                    ('digest', models.CharField(db_index=True, max_length=64, verbose_name='digest of the user id')),
                    ('user_id', models.CharField(blank=True, max_length=200, verbose_name='user id')),
                    ('identifiers', models.JSONField(default=dict)),
                    ('customer', models.ForeignKey(null=True, on_delete=django.db.models.deletion.SET_NULL, related_name='+', to='scheduling.customer', verbose_name='customer')),
                    ('actor', models.CharField(max_length=160, verbose_name='who')),
                    ('state', models.CharField(choices=[('running', 'Under way'), ('done', 'Done')], default='running', max_length=10, verbose_name='state')),
                    ('requested_at', models.DateTimeField(default=django.utils.timezone.now, verbose_name='requested at')),
                    ('ended_at', models.DateTimeField(null=True, verbose_name='ended at')),
                    ('counts', models.JSONField(default=dict, verbose_name='rows')),
                ],
                options={
                    'verbose_name': 'erasure',
                    'verbose_name_plural': 'erasures',
                    'ordering': ['-id'],
                    'default_permissions': ('view',),
                    'indexes': [models.Index(condition=models.Q(('state', 'running')), fields=['requested_at'], name='erasure_running')],
                },
            ),
            migrations.CreateModel(
                name='CustomerImport',
                fields=[
                    ('id', models.UUIDField(default=scheduling.ids.new_id, editable=False, primary_key=True, serialize=False)),
                    ('file_name', models.CharField(max_length=200, verbose_name='file')),
                    ('size', models.BigIntegerField(verbose_name='size in bytes')),
                    ('stored', models.BigIntegerField(default=0)),
                    ('encoding', models.CharField(blank=True, max_length=10, verbose_name='encoding')),
                    ('empty_clears', models.BooleanField(default=False, verbose_name='empty cells clear values')),
                    ('actor_name', models.CharField(max_length=150, verbose_name='who')),
                    ('created_at', models.DateTimeField(default=django.utils.timezone.now, verbose_name='started at')),
                    ('state', models.CharField(choices=[('uploading', 'Incomplete'), ('checking', 'Being checked'), ('ready', 'Waits for your decision'), ('running', 'Under way'), ('done', 'Done'), ('stopped', 'Stopped'), ('discarded', 'Discarded'), ('failed', 'Failed')], default='uploading', max_length=10, verbose_name='state')),
                    ('ended_at', models.DateTimeField(null=True, verbose_name='ended at')),
                    ('ended_by', models.CharField(blank=True, max_length=150, verbose_name='ended by')),
                    ('header', models.JSONField(default=list)),
                    ('delimiter', models.CharField(default=',', max_length=1)),
                    ('position', models.BigIntegerField(default=0)),
                    ('line', models.PositiveIntegerField(default=1)),
                    ('counts', models.JSONField(default=dict)),
                    ('tries', models.PositiveSmallIntegerField(default=0)),
                    ('retry_at', models.DateTimeField(default=django.utils.timezone.now)),
                    ('problems', models.JSONField(default=list)),
                ],
                options={
                    'verbose_name': 'customer import',
                    'verbose_name_plural': 'customer imports',
                    'ordering': ['-id'],
                    'default_permissions': ('view', 'add'),
                },
            ),
            migrations.CreateModel(
                name='CustomerImportPart',
                fields=[
                    ('id', models.BigAutoField(auto_created=True, primary_key=True, serialize=False, verbose_name='ID')),
                    ('upload', models.ForeignKey(db_index=False, on_delete=django.db.models.deletion.CASCADE, related_name='parts', to='scheduling.customerimport')),
                    ('start', models.BigIntegerField()),
                    ('content', models.BinaryField()),
                ],
                options={
                    'default_permissions': (),
                    'constraints': [models.UniqueConstraint(fields=('upload', 'start'), name='import_part')],
                },
            ),
            migrations.CreateModel(
                name='RefusedLines',
                fields=[
                    ('id', models.BigAutoField(auto_created=True, primary_key=True, serialize=False, verbose_name='ID')),
                    ('upload', models.ForeignKey(db_index=False, on_delete=django.db.models.deletion.CASCADE, related_name='refused', to='scheduling.customerimport')),
                    ('entries', models.JSONField()),
                ],
                options={
                    'default_permissions': (),
                    'indexes': [models.Index(fields=['upload', 'id'], name='import_refused')],
                },
            ),
            migrations.CreateModel(
                name='Community',
                fields=[
                    ('id', models.BigAutoField(auto_created=True, primary_key=True, serialize=False, verbose_name='ID')),
                    ('chat_id', models.CharField(max_length=200, unique=True, verbose_name='chat id')),
                    ('name', models.CharField(blank=True, max_length=200, verbose_name='name')),
                    ('targets', scheduling.models.encrypted.EncryptedJSONField(blank=True, default=dict, verbose_name='targets')),
                    ('retired_at', models.DateTimeField(blank=True, editable=False, null=True, verbose_name='retired at')),
                ],
                options={
                    'verbose_name': 'community',
                    'verbose_name_plural': 'communities',
                    'ordering': ['chat_id'],
                },
            ),
            migrations.CreateModel(
                name='Complaint',
                fields=[
                    ('id', models.BigAutoField(auto_created=True, primary_key=True, serialize=False, verbose_name='ID')),
                    ('event', models.OneToOneField(on_delete=django.db.models.deletion.CASCADE, to='scheduling.event', verbose_name='event')),
                    ('customer', models.ForeignKey(on_delete=django.db.models.deletion.CASCADE, to='scheduling.customer', verbose_name='customer')),
                    ('touch', models.ForeignKey(db_constraint=False, null=True, on_delete=django.db.models.deletion.SET_NULL, related_name='complaints', to='scheduling.touch', verbose_name='touch')),
                    ('complained_at', models.DateTimeField(verbose_name='complained at')),
                ],
                options={
                    'verbose_name': 'complaint',
                    'verbose_name_plural': 'complaints',
                },
            ),
            migrations.CreateModel(
                name='EventType',
                fields=[
                    ('id', models.BigAutoField(auto_created=True, primary_key=True, serialize=False, verbose_name='ID')),
                    ('key', models.CharField(max_length=120, unique=True, verbose_name='type')),
                    ('name', models.CharField(blank=True, max_length=120, verbose_name='name')),
                    ('is_activity', models.BooleanField(default=True, verbose_name='is customer activity')),
                    ('created_at', models.DateTimeField(default=django.utils.timezone.now, editable=False, verbose_name='created at')),
                ],
                options={
                    'verbose_name': 'event type',
                    'verbose_name_plural': 'event types',
                    'ordering': ['key'],
                },
            ),
            migrations.CreateModel(
                name='Event',
                fields=[
                    ('id', models.UUIDField(default=scheduling.ids.new_id, editable=False, primary_key=True, serialize=False)),
                    ('source', models.CharField(max_length=255, verbose_name='source')),
                    ('event_id', models.CharField(max_length=255, verbose_name='event id')),
                    ('type', models.CharField(max_length=120, verbose_name='type')),
                    ('occurred_at', models.DateTimeField(verbose_name='occurred at')),
                    ('received_at', models.DateTimeField(default=django.utils.timezone.now, verbose_name='received at')),
                    ('customer', models.ForeignKey(db_constraint=False, db_index=False, on_delete=django.db.models.deletion.PROTECT, related_name='events', to='scheduling.customer', verbose_name='customer')),
                    ('user_id', models.CharField(max_length=200, verbose_name='user id')),
                    ('chat_id', models.CharField(blank=True, max_length=200, verbose_name='chat id')),
                    ('data', models.JSONField(default=dict, verbose_name='data')),
                    ('trace_id', models.UUIDField(editable=False, null=True, verbose_name='trace id')),
                ],
                options={
                    'verbose_name': 'event',
                    'verbose_name_plural': 'events',
                    'indexes': [models.Index(fields=['customer', 'type', 'occurred_at'], name='event_of_customer'), models.Index(fields=['type', 'id'], name='event_of_type'), models.Index(condition=models.Q(('trace_id__isnull', False)), fields=['trace_id'], name='event_traced')],
                    'constraints': [models.UniqueConstraint(fields=('source', 'event_id'), name='event_once')],
                },
            ),
            migrations.CreateModel(
                name='FailedTask',
                fields=[
                    ('id', models.UUIDField(default=scheduling.ids.new_id, editable=False, primary_key=True, serialize=False)),
                    ('origin', models.CharField(choices=[('touch', 'Touch'), ('rpa_job', 'RPA job'), ('message', 'Broker message')], max_length=10, verbose_name='origin')),
                    ('task_id', models.UUIDField(null=True, unique=True, verbose_name='task id')),
                    ('root_id', models.UUIDField(null=True, verbose_name='delivery key')),
                    ('failure', models.CharField(max_length=12, verbose_name='class')),
                    ('reason', models.CharField(max_length=64, verbose_name='reason')),
                    ('detail', models.TextField(blank=True, verbose_name='detail')),
                    ('payload', models.JSONField(default=dict, verbose_name='original')),
                    ('attempts', models.JSONField(default=list, verbose_name='attempts')),
                    ('channel', models.CharField(blank=True, max_length=64, verbose_name='channel')),
                    ('fingerprint', models.CharField(db_index=True, max_length=32, verbose_name='fingerprint')),
                    ('state', models.CharField(choices=[('open', 'Open'), ('retried', 'Published again'), ('resolved_delivered', 'Resolved: delivered'), ('resolved_not_delivered', 'Resolved: not delivered'), ('ignored', 'Ignored'), ('archived', 'Archived')], default='open', max_length=24, verbose_name='state')),
                    ('failed_at', models.DateTimeField(default=django.utils.timezone.now, verbose_name='failed at')),
                    ('acted_at', models.DateTimeField(null=True, verbose_name='acted at')),
                    ('actor', models.ForeignKey(null=True, on_delete=django.db.models.deletion.SET_NULL, to=settings.AUTH_USER_MODEL, verbose_name='actor')),
                    ('actor_name', models.CharField(blank=True, max_length=150, verbose_name='actor')),
                    ('action_reason', models.CharField(blank=True, max_length=500, verbose_name='reason of the action')),
                    ('retried_as', models.UUIDField(null=True, verbose_name='published again as')),
                    ('difference', models.JSONField(null=True, verbose_name='difference')),
                    ('assignee', models.ForeignKey(null=True, on_delete=django.db.models.deletion.SET_NULL, related_name='assigned_failed_tasks', to=settings.AUTH_USER_MODEL, verbose_name='assignee')),
                ],
                options={
                    'verbose_name': 'failed task',
                    'verbose_name_plural': 'failed tasks',
                    'ordering': ['-failed_at'],
                    'permissions': [('act_on_failedtask', 'Can retry, resolve, ignore and archive failed tasks')],
                    'indexes': [models.Index(condition=models.Q(('state', 'open')), fields=['-failed_at'], name='failed_open'), models.Index(condition=models.Q(('difference__isnull', False)), fields=['retried_as'], name='failed_edited')],
                },
            ),
            migrations.CreateModel(
                name='FailedTaskComment',
                fields=[
                    ('id', models.BigAutoField(auto_created=True, primary_key=True, serialize=False, verbose_name='ID')),
                    ('failed_task', models.ForeignKey(on_delete=django.db.models.deletion.CASCADE, related_name='comments', to='scheduling.failedtask')),
                    ('author', models.ForeignKey(null=True, on_delete=django.db.models.deletion.SET_NULL, related_name='+', to=settings.AUTH_USER_MODEL)),
                    ('author_name', models.CharField(max_length=150, verbose_name='author')),
                    ('text', models.TextField(max_length=2000, verbose_name='comment')),
                    ('commented_at', models.DateTimeField(default=django.utils.timezone.now, verbose_name='commented at')),
                ],
                options={
                    'ordering': ['pk'],
                    'default_permissions': (),
                },
            ),
            migrations.CreateModel(
                name='TotpDevice',
                fields=[
                    ('id', models.BigAutoField(auto_created=True, primary_key=True, serialize=False, verbose_name='ID')),
                    ('user', models.OneToOneField(editable=False, on_delete=django.db.models.deletion.CASCADE, related_name='totp_device', to=settings.AUTH_USER_MODEL)),
                    ('secret', scheduling.models.encrypted.EncryptedJSONField(editable=False)),
                    ('last_step', models.BigIntegerField(default=0, editable=False)),
                    ('recovery_digests', django.contrib.postgres.fields.ArrayField(base_field=models.CharField(max_length=64), default=list, editable=False, size=None)),
                    ('created_at', models.DateTimeField(default=django.utils.timezone.now, editable=False)),
                    ('confirmed_at', models.DateTimeField(editable=False, null=True)),
                ],
                options={
                    'verbose_name': 'second factor',
                    'verbose_name_plural': 'second factors',
                    'default_permissions': (),
                },
            ),
            migrations.CreateModel(
                name='Invitation',
                fields=[
                    ('id', models.BigAutoField(auto_created=True, primary_key=True, serialize=False, verbose_name='ID')),
                    ('email', models.EmailField(blank=True, max_length=254, verbose_name='e-mail address')),
                    ('name', models.CharField(blank=True, max_length=150, verbose_name='name')),
                    ('role', models.CharField(choices=[('viewer', 'Viewer: sees everything, changes nothing'), ('operator', 'Operator: settles failed tasks, pauses, cancels'), ('editor', 'Editor: also edits the matrix, rules and templates'), ('command editor', 'Command editor: edits commands on execution nodes'), ('administrator', 'Administrator: everything, also users and keys')], max_length=20, verbose_name='role')),
                    ('digest', models.CharField(editable=False, max_length=64, unique=True)),
                    ('invited_by', models.ForeignKey(editable=False, null=True, on_delete=django.db.models.deletion.SET_NULL, related_name='+', to=settings.AUTH_USER_MODEL, verbose_name='invited by')),
                    ('created_at', models.DateTimeField(default=django.utils.timezone.now, editable=False, verbose_name='invited at')),
                    ('expires_at', models.DateTimeField(editable=False, verbose_name='valid until')),
                    ('accepted_at', models.DateTimeField(editable=False, null=True, verbose_name='accepted at')),
                    ('withdrawn_at', models.DateTimeField(editable=False, null=True, verbose_name='withdrawn at')),
                    ('user', models.ForeignKey(editable=False, null=True, on_delete=django.db.models.deletion.SET_NULL, related_name='+', to=settings.AUTH_USER_MODEL, verbose_name='user')),
                ],
                options={
                    'verbose_name': 'invitation',
                    'verbose_name_plural': 'invitations',
                    'ordering': ['-created_at'],
                    'default_permissions': (),
                },
            ),
            migrations.CreateModel(
                name='SignIn',
                fields=[
                    ('id', models.BigAutoField(auto_created=True, primary_key=True, serialize=False, verbose_name='ID')),
                    ('digest', models.CharField(editable=False, max_length=64, unique=True)),
                    ('user', models.ForeignKey(on_delete=django.db.models.deletion.CASCADE, related_name='sign_ins', to=settings.AUTH_USER_MODEL)),
                    ('signed_in_at', models.DateTimeField(default=django.utils.timezone.now, editable=False, verbose_name='signed in at')),
                    ('address', models.CharField(editable=False, max_length=45, verbose_name='address')),
                    ('browser', models.CharField(editable=False, max_length=300, verbose_name='browser')),
                ],
                options={
                    'verbose_name': 'sign-in',
                    'verbose_name_plural': 'sign-ins',
                    'ordering': ['-signed_in_at', '-pk'],
                    'default_permissions': (),
                },
            ),
            migrations.CreateModel(
                name='IdentityLink',
                fields=[
                    ('id', models.BigAutoField(auto_created=True, primary_key=True, serialize=False, verbose_name='ID')),
                    ('user', models.ForeignKey(on_delete=django.db.models.deletion.CASCADE, related_name='identity_links', to=settings.AUTH_USER_MODEL)),
                    ('issuer', models.CharField(max_length=255, verbose_name='issuer')),
                    ('subject', models.CharField(max_length=255, verbose_name='subject at the provider')),
                    ('linked_at', models.DateTimeField(default=django.utils.timezone.now, editable=False, verbose_name='linked at')),
                ],
                options={
                    'verbose_name': 'identity of the provider',
                    'verbose_name_plural': 'identities of the provider',
                    'default_permissions': (),
                    'constraints': [models.UniqueConstraint(fields=('issuer', 'subject'), name='identity_once')],
                },
            ),
            migrations.CreateModel(
                name='DeliveryReceipt',
                fields=[
                    ('id', models.UUIDField(default=scheduling.ids.new_id, editable=False, primary_key=True, serialize=False)),
                    ('delivery_key', models.UUIDField(verbose_name='delivery key')),
                    ('kind', models.CharField(choices=[('delivered', 'Reached the device'), ('read', 'Read'), ('clicked', 'Link opened'), ('replied', 'Replied'), ('bounced', 'Bounced'), ('complained', 'Complained')], max_length=10, verbose_name='receipt')),
                    ('node', models.ForeignKey(db_index=False, on_delete=django.db.models.deletion.CASCADE, related_name='receipts', to='scheduling.node', verbose_name='node')),
                    ('at', models.DateTimeField(verbose_name='at')),
                    ('received_at', models.DateTimeField(default=django.utils.timezone.now, verbose_name='received at')),
                    ('detail', models.CharField(blank=True, max_length=300, verbose_name='detail')),
                ],
                options={
                    'verbose_name': 'receipt',
                    'verbose_name_plural': 'receipts',
                    'indexes': [models.Index(fields=['node', 'received_at'], name='receipt_of_node')],
                    'constraints': [models.UniqueConstraint(fields=('delivery_key', 'kind'), name='receipt_once')],
                },
            ),
            migrations.CreateModel(
                name='VendorMessage',
                fields=[
                    ('id', models.UUIDField(default=scheduling.ids.new_id, editable=False, primary_key=True, serialize=False)),
                    ('channel', models.ForeignKey(db_index=False, on_delete=django.db.models.deletion.CASCADE, to='scheduling.channelconfig', verbose_name='channel')),
                    ('vendor_id', models.CharField(max_length=120, verbose_name="vendor's id")),
                    ('delivery_key', models.UUIDField(db_index=True, verbose_name='delivery key')),
                ],
                options={
                    'verbose_name': "vendor's id of a message",
                    'verbose_name_plural': "vendors' ids of messages",
                    'constraints': [models.UniqueConstraint(fields=('channel', 'vendor_id'), name='vendor_message_once')],
                },
            ),
            migrations.CreateModel(
                name='ConfigDraft',
                fields=[
                    ('id', models.BigAutoField(auto_created=True, primary_key=True, serialize=False, verbose_name='ID')),
                    ('owner', models.OneToOneField(on_delete=django.db.models.deletion.CASCADE, related_name='config_draft', to=settings.AUTH_USER_MODEL, verbose_name='who')),
                    ('base', models.TextField(verbose_name='live configuration')),
                    ('document', models.TextField(verbose_name='draft')),
                    ('started_at', models.DateTimeField(db_default=django.db.models.functions.datetime.Now(), editable=False, verbose_name='started at')),
                    ('state', models.CharField(choices=[('open', 'Not replayed yet'), ('waiting', 'Waiting for a worker'), ('running', 'Running'), ('done', 'Replayed'), ('failed', 'Failed')], default='open', editable=False, max_length=10, verbose_name='state')),
                    ('state_at', models.DateTimeField(db_default=django.db.models.functions.datetime.Now(), editable=False, verbose_name='since')),
                    ('result', models.JSONField(null=True, verbose_name='result')),
                    ('problems', models.JSONField(default=list, verbose_name='problem')),
                ],
                options={
                    'verbose_name': 'draft',
                    'verbose_name_plural': 'drafts',
                    'ordering': ['-id'],
                    'permissions': [('publish_configdraft', 'Can publish a draft that was replayed')],
                    'default_permissions': ('add', 'delete', 'view'),
                },
            ),
            migrations.CreateModel(
                name='AutomaticRollout',
                fields=[
                    ('node', models.OneToOneField(on_delete=django.db.models.deletion.CASCADE, primary_key=True, related_name='automatic_rollout', serialize=False, to='scheduling.node', verbose_name='service node')),
                    ('canary_version', models.PositiveIntegerField(verbose_name='version of the canary template')),
                    ('plan', models.JSONField(verbose_name='plan')),
                    ('state', models.CharField(choices=[('running', 'Running'), ('finished', 'Finished'), ('withdrawn', 'Withdrawn'), ('stopped', 'Stopped')], default='running', max_length=10, verbose_name='state')),
                    ('step', models.PositiveSmallIntegerField(default=0, verbose_name='step')),
                    ('reason', models.CharField(blank=True, max_length=20, verbose_name='reason')),
                    ('ended', models.PositiveIntegerField(default=0, verbose_name='ended')),
                    ('failed', models.PositiveIntegerField(default=0, verbose_name='failed')),
                    ('complained', models.PositiveIntegerField(default=0, verbose_name='complained')),
                    ('counted_until', models.DateTimeField(default=django.utils.timezone.now)),
                    ('step_at', models.DateTimeField(default=django.utils.timezone.now, verbose_name='step since')),
                    ('judged_at', models.DateTimeField(null=True, verbose_name='judged at')),
                    ('canary', models.ForeignKey(on_delete=django.db.models.deletion.PROTECT, related_name='+', to='scheduling.template', verbose_name='canary template')),
                ],
                options={
                    'verbose_name': 'automatic roll-out',
                    'verbose_name_plural': 'automatic roll-outs',
                    'default_permissions': (),
                },
            ),
            migrations.CreateModel(
                name='HistoricalDelayRule',
                fields=[
                    ('id', models.BigIntegerField(auto_created=True, blank=True, db_index=True, verbose_name='ID')),
                    ('version', models.PositiveIntegerField(default=1, editable=False, verbose_name='version')),
                    ('by_level', models.JSONField(blank=True, default=dict, verbose_name='seconds by level')),
                    ('default', models.DurationField(default=datetime.timedelta(days=1), validators=[scheduling.models.versioned.Bound(scheduling.errors.check_span)], verbose_name='otherwise')),
                    ('active_within', models.DurationField(default=datetime.timedelta(days=1), validators=[scheduling.models.versioned.Bound(scheduling.errors.check_span)], verbose_name='active within')),
                    ('active_factor', models.FloatField(default=0.6, validators=[scheduling.models.versioned.Bound(scheduling.errors.check_number, least=0.01, most=10)], verbose_name='factor when active')),
                    ('history_id', models.AutoField(primary_key=True, serialize=False)),
                    ('history_date', models.DateTimeField(db_index=True)),
                    ('history_change_reason', models.CharField(max_length=100, null=True)),
                    ('history_type', models.CharField(choices=[('+', 'Created'), ('~', 'Changed'), ('-', 'Deleted')], max_length=1)),
                    ('history_user', models.ForeignKey(null=True, on_delete=django.db.models.deletion.SET_NULL, related_name='+', to=settings.AUTH_USER_MODEL)),
                ],
                options={
                    'verbose_name': 'historical delay rule',
                    'verbose_name_plural': 'historical delay rules',
                    'ordering': ('-history_date', '-history_id'),
                    'get_latest_by': ('history_date', 'history_id'),
                },
                bases=(simple_history.models.HistoricalChanges, models.Model),
            ),
            migrations.CreateModel(
                name='DelayRule',
                fields=[
                    ('id', models.BigAutoField(auto_created=True, primary_key=True, serialize=False, verbose_name='ID')),
                    ('version', models.PositiveIntegerField(default=1, editable=False, verbose_name='version')),
                    ('by_level', models.JSONField(blank=True, default=dict, verbose_name='seconds by level')),
                    ('default', models.DurationField(default=datetime.timedelta(days=1), validators=[scheduling.models.versioned.Bound(scheduling.errors.check_span)], verbose_name='otherwise')),
                    ('active_within', models.DurationField(default=datetime.timedelta(days=1), validators=[scheduling.models.versioned.Bound(scheduling.errors.check_span)], verbose_name='active within')),
                    ('active_factor', models.FloatField(default=0.6, validators=[scheduling.models.versioned.Bound(scheduling.errors.check_number, least=0.01, most=10)], verbose_name='factor when active')),
                ],
                options={
                    'verbose_name': 'delay rule',
                    'verbose_name_plural': 'delay rules',
                    'constraints': [models.CheckConstraint(condition=models.Q(('pk', 1)), name='one_delay_rule')],
                },
            ),
            migrations.CreateModel(
                name='HistoricalHarassmentRule',
                fields=[
                    ('id', models.BigIntegerField(auto_created=True, blank=True, db_index=True, verbose_name='ID')),
                    ('version', models.PositiveIntegerField(default=1, editable=False, verbose_name='version')),
                    ('kind', models.CharField(choices=[('cap', 'At most so many in a rolling window'), ('dedupe', 'The same content type not again within a window'), ('conversation', 'Not into a new conversation'), ('quiet_hours', 'Not during quiet hours')], max_length=20, verbose_name='kind')),
                    ('scope', models.CharField(choices=[('user', 'Customer'), ('community', 'Community')], default='user', max_length=10, verbose_name='counted for')),
                    ('limit', models.PositiveIntegerField(blank=True, null=True, validators=[scheduling.models.versioned.Bound(scheduling.errors.check_number, least=1, most=1000000)], verbose_name='limit')),
                    ('limits', models.JSONField(blank=True, default=dict, verbose_name='limits by level')),
                    ('channel', models.CharField(blank=True, default='', max_length=64, verbose_name='only this channel')),
                    ('category', models.CharField(blank=True, choices=[('marketing', 'Marketing (blocked by opt-out)'), ('service', 'Service')], default='', max_length=10, verbose_name='only this category')),
                    ('tag', models.CharField(blank=True, default='', max_length=64, verbose_name='only nodes with this tag')),
                    ('window', models.DurationField(blank=True, null=True, validators=[scheduling.models.versioned.Bound(scheduling.errors.check_span, least=datetime.timedelta(microseconds=1))], verbose_name='window')),
                    ('quiet_from', models.TimeField(blank=True, null=True, verbose_name='quiet from')),
                    ('quiet_to', models.TimeField(blank=True, null=True, verbose_name='quiet to')),
                    ('timezone', models.CharField(default=django.utils.timezone.get_default_timezone_name, max_length=60, verbose_name='time zone')),
                    ('enabled', models.BooleanField(default=True, verbose_name='enabled')),
                    ('retired_at', models.DateTimeField(blank=True, editable=False, null=True, verbose_name='retired at')),
                    ('history_id', models.AutoField(primary_key=True, serialize=False)),
                    ('history_date', models.DateTimeField(db_index=True)),
                    ('history_change_reason', models.CharField(max_length=100, null=True)),
                    ('history_type', models.CharField(choices=[('+', 'Created'), ('~', 'Changed'), ('-', 'Deleted')], max_length=1)),
                    ('history_user', models.ForeignKey(null=True, on_delete=django.db.models.deletion.SET_NULL, related_name='+', to=settings.AUTH_USER_MODEL)),
                ],
                options={
                    'verbose_name': 'historical anti-harassment rule',
                    'verbose_name_plural': 'historical anti-harassment rules',
                    'ordering': ('-history_date', '-history_id'),
                    'get_latest_by': ('history_date', 'history_id'),
                },
                bases=(simple_history.models.HistoricalChanges, models.Model),
            ),
            migrations.CreateModel(
                name='HarassmentRule',
                fields=[
                    ('id', models.BigAutoField(auto_created=True, primary_key=True, serialize=False, verbose_name='ID')),
                    ('version', models.PositiveIntegerField(default=1, editable=False, verbose_name='version')),
                    ('kind', models.CharField(choices=[('cap', 'At most so many in a rolling window'), ('dedupe', 'The same content type not again within a window'), ('conversation', 'Not into a new conversation'), ('quiet_hours', 'Not during quiet hours')], max_length=20, verbose_name='kind')),
                    ('scope', models.CharField(choices=[('user', 'Customer'), ('community', 'Community')], default='user', max_length=10, verbose_name='counted for')),
                    ('limit', models.PositiveIntegerField(blank=True, null=True, validators=[scheduling.models.versioned.Bound(scheduling.errors.check_number, least=1, most=1000000)], verbose_name='limit')),
                    ('limits', models.JSONField(blank=True, default=dict, verbose_name='limits by level')),
                    ('channel', models.CharField(blank=True, default='', max_length=64, verbose_name='only this channel')),
                    ('category', models.CharField(blank=True, choices=[('marketing', 'Marketing (blocked by opt-out)'), ('service', 'Service')], default='', max_length=10, verbose_name='only this category')),
                    ('tag', models.CharField(blank=True, default='', max_length=64, verbose_name='only nodes with this tag')),
                    ('window', models.DurationField(blank=True, null=True, validators=[scheduling.models.versioned.Bound(scheduling.errors.check_span, least=datetime.timedelta(microseconds=1))], verbose_name='window')),
                    ('quiet_from', models.TimeField(blank=True, null=True, verbose_name='quiet from')),
                    ('quiet_to', models.TimeField(blank=True, null=True, verbose_name='quiet to')),
                    ('timezone', models.CharField(default=django.utils.timezone.get_default_timezone_name, max_length=60, verbose_name='time zone')),
                    ('enabled', models.BooleanField(default=True, verbose_name='enabled')),
                    ('retired_at', models.DateTimeField(blank=True, editable=False, null=True, verbose_name='retired at')),
                ],
                options={
                    'verbose_name': 'anti-harassment rule',
                    'verbose_name_plural': 'anti-harassment rules',
                    'ordering': ['id'],
                    'constraints': [models.CheckConstraint(condition=models.Q(models.Q(('kind', 'cap'), _negated=True), models.Q(('limit__isnull', False), ('window__isnull', False)), _connector='OR'), name='cap_has_limit_and_window'), models.CheckConstraint(condition=models.Q(models.Q(('kind', 'dedupe'), _negated=True), ('window__isnull', False), _connector='OR'), name='dedupe_has_window'), models.CheckConstraint(condition=models.Q(models.Q(('kind', 'quiet_hours'), _negated=True), models.Q(('quiet_from__isnull', False), ('quiet_to__isnull', False)), _connector='OR'), name='quiet_hours_have_ends')],
                },
            ),
            migrations.CreateModel(
                name='HistoricalHoldout',
                fields=[
                    ('id', models.BigIntegerField(auto_created=True, blank=True, db_index=True, verbose_name='ID')),
                    ('version', models.PositiveIntegerField(default=1, editable=False, verbose_name='version')),
                    ('percent', models.FloatField(default=0, validators=[scheduling.models.versioned.Bound(scheduling.errors.check_number, least=0, most=100)], verbose_name='percent of customers')),
                    ('key', models.CharField(blank=True, default='', max_length=64, verbose_name='key of the draw')),
                    ('history_id', models.AutoField(primary_key=True, serialize=False)),
                    ('history_date', models.DateTimeField(db_index=True)),
                    ('history_change_reason', models.CharField(max_length=100, null=True)),
                    ('history_type', models.CharField(choices=[('+', 'Created'), ('~', 'Changed'), ('-', 'Deleted')], max_length=1)),
                    ('history_user', models.ForeignKey(null=True, on_delete=django.db.models.deletion.SET_NULL, related_name='+', to=settings.AUTH_USER_MODEL)),
                ],
                options={
                    'verbose_name': 'historical global hold-out',
                    'verbose_name_plural': 'historical global hold-outs',
                    'ordering': ('-history_date', '-history_id'),
                    'get_latest_by': ('history_date', 'history_id'),
                },
                bases=(simple_history.models.HistoricalChanges, models.Model),
            ),
            migrations.CreateModel(
                name='Holdout',
                fields=[
                    ('id', models.BigAutoField(auto_created=True, primary_key=True, serialize=False, verbose_name='ID')),
                    ('version', models.PositiveIntegerField(default=1, editable=False, verbose_name='version')),
                    ('percent', models.FloatField(default=0, validators=[scheduling.models.versioned.Bound(scheduling.errors.check_number, least=0, most=100)], verbose_name='percent of customers')),
                    ('key', models.CharField(blank=True, default='', max_length=64, verbose_name='key of the draw')),
                ],
                options={
                    'verbose_name': 'global hold-out',
                    'verbose_name_plural': 'global hold-outs',
                    'constraints': [models.CheckConstraint(condition=models.Q(('pk', 1)), name='one_holdout')],
                },
            ),
            migrations.CreateModel(
                name='HistoricalCalendar',
                fields=[
                    ('id', models.BigIntegerField(auto_created=True, blank=True, db_index=True, verbose_name='ID')),
                    ('version', models.PositiveIntegerField(default=1, editable=False, verbose_name='version')),
                    ('key', models.CharField(db_index=True, max_length=64, validators=[scheduling.models.versioned.Bound(scheduling.errors.check_key)], verbose_name='key')),
                    ('position', models.PositiveSmallIntegerField(default=0, validators=[scheduling.models.versioned.Bound(scheduling.errors.check_number, least=0, most=32767)], verbose_name='position')),
                    ('timezone', models.CharField(default=django.utils.timezone.get_default_timezone_name, max_length=60, verbose_name='time zone')),
                    ('country', models.CharField(blank=True, default='CN', max_length=6, verbose_name='country of the holidays')),
                    ('closed', models.JSONField(blank=True, default=list, verbose_name='own days off')),
                    ('open', models.JSONField(blank=True, default=list, verbose_name='own working days')),
                    ('send_window', models.JSONField(blank=True, default=list, verbose_name='default send windows')),
                    ('retired_at', models.DateTimeField(blank=True, editable=False, null=True, verbose_name='retired at')),
                    ('history_id', models.AutoField(primary_key=True, serialize=False)),
                    ('history_date', models.DateTimeField(db_index=True)),
                    ('history_change_reason', models.CharField(max_length=100, null=True)),
                    ('history_type', models.CharField(choices=[('+', 'Created'), ('~', 'Changed'), ('-', 'Deleted')], max_length=1)),
                    ('history_user', models.ForeignKey(null=True, on_delete=django.db.models.deletion.SET_NULL, related_name='+', to=settings.AUTH_USER_MODEL)),
                ],
                options={
                    'verbose_name': 'historical calendar',
                    'verbose_name_plural': 'historical calendars',
                    'ordering': ('-history_date', '-history_id'),
                    'get_latest_by': ('history_date', 'history_id'),
                },
                bases=(simple_history.models.HistoricalChanges, models.Model),
            ),
            migrations.CreateModel(
                name='Calendar',
                fields=[
                    ('id', models.BigAutoField(auto_created=True, primary_key=True, serialize=False, verbose_name='ID')),
                    ('version', models.PositiveIntegerField(default=1, editable=False, verbose_name='version')),
                    ('key', models.CharField(max_length=64, unique=True, validators=[scheduling.models.versioned.Bound(scheduling.errors.check_key)], verbose_name='key')),
                    ('position', models.PositiveSmallIntegerField(default=0, validators=[scheduling.models.versioned.Bound(scheduling.errors.check_number, least=0, most=32767)], verbose_name='position')),
                    ('timezone', models.CharField(default=django.utils.timezone.get_default_timezone_name, max_length=60, verbose_name='time zone')),
                    ('country', models.CharField(blank=True, default='CN', max_length=6, verbose_name='country of the holidays')),
                    ('closed', models.JSONField(blank=True, default=list, verbose_name='own days off')),
                    ('open', models.JSONField(blank=True, default=list, verbose_name='own working days')),
                    ('send_window', models.JSONField(blank=True, default=list, verbose_name='default send windows')),
                    ('retired_at', models.DateTimeField(blank=True, editable=False, null=True, verbose_name='retired at')),
                ],
                options={
                    'verbose_name': 'calendar',
                    'verbose_name_plural': 'calendars',
                    'ordering': ['position', 'key'],
                },
            ),
            migrations.CreateModel(
                name='Touch',
                fields=[
                    ('task_id', models.UUIDField(default=scheduling.ids.new_id, editable=False, primary_key=True, serialize=False, verbose_name='task id')),
                    ('root_id', models.UUIDField(default=scheduling.ids.new_id, editable=False, verbose_name='delivery key')),
                    ('retry_of', models.UUIDField(editable=False, null=True, verbose_name='retry of')),
                    ('priority', models.SmallIntegerField(choices=[(0, 'High'), (1, 'Normal'), (2, 'Low')], default=1, verbose_name='priority')),
                    ('due_at', models.DateTimeField(verbose_name='due at')),
                    ('planned_at', models.DateTimeField(verbose_name='planned at')),
                    ('paused_by', models.CharField(blank=True, default='', max_length=120, verbose_name='paused by')),
                    ('attempt', models.SmallIntegerField(default=0, verbose_name='attempts')),
                    ('lease_no', models.IntegerField(default=0, verbose_name='lease number')),
                    ('lease_until', models.DateTimeField(null=True, verbose_name='lease until')),
                    ('wakeups', models.SmallIntegerField(default=0, verbose_name='wake-ups')),
                    ('queued_at', models.DateTimeField(null=True, verbose_name='dispatched at')),
                    ('sending_at', models.DateTimeField(null=True, verbose_name='sending at')),
                    ('settled_at', models.DateTimeField(null=True, verbose_name='settled at')),
                    ('reason', models.CharField(blank=True, default='', max_length=64, verbose_name='reason')),
                    ('created_at', models.DateTimeField(default=django.utils.timezone.now, editable=False, verbose_name='created at')),
                    ('state', models.CharField(choices=[('scheduled', 'Scheduled'), ('queued', 'Dispatched'), ('running', 'Running'), ('delivered', 'Delivered'), ('suppressed', 'Suppressed'), ('cancelled', 'Cancelled'), ('failed', 'Failed'), ('unknown', 'Unknown')], default='scheduled', editable=False, max_length=10, verbose_name='state')),
                    ('event', models.ForeignKey(db_constraint=False, db_index=False, on_delete=django.db.models.deletion.PROTECT, related_name='touches', to='scheduling.event', verbose_name='event')),
                    ('node', models.ForeignKey(db_constraint=False, db_index=False, on_delete=django.db.models.deletion.PROTECT, related_name='touches', to='scheduling.node', verbose_name='node')),
                    ('node_version', models.PositiveIntegerField(verbose_name='node version when planned')),
                    ('customer', models.ForeignKey(db_constraint=False, db_index=False, on_delete=django.db.models.deletion.PROTECT, related_name='touches', to='scheduling.customer', verbose_name='customer')),
                    ('chat_id', models.CharField(blank=True, max_length=200, verbose_name='chat id')),
                    ('expires_at', models.DateTimeField(verbose_name='expires at')),
                    ('template', models.ForeignKey(db_constraint=False, db_index=False, null=True, on_delete=django.db.models.deletion.PROTECT, related_name='touches', to='scheduling.template', verbose_name='template')),
                    ('template_version', models.PositiveIntegerField(null=True, verbose_name='template version')),
                    ('content_type', models.CharField(blank=True, default='', max_length=64, verbose_name='content type')),
                    ('reserved_at', models.DateTimeField(null=True, verbose_name='cap slot reserved at')),
                    ('counts_toward_cap', models.BooleanField(default=True, verbose_name='counts toward the cap')),
                    ('verdicts', scheduling.models.touch.LogField(default=list, editable=False, entry=scheduling.models.touch.Verdict, null=True, verbose_name='verdicts')),
                    ('attempts', scheduling.models.touch.LogField(default=list, editable=False, entry=scheduling.models.touch.Attempt, null=True, verbose_name='attempts')),
                ],
                options={
                    'verbose_name': 'touch',
                    'verbose_name_plural': 'touches',
                    'indexes': [models.Index(condition=models.Q(('paused_by', ''), ('state', 'scheduled')), fields=['priority', 'due_at'], name='touch_due'), models.Index(condition=models.Q(('state__in', ('queued', 'running'))), fields=['lease_until'], name='touch_leased'), models.Index(condition=models.Q(('paused_by', ''), _negated=True), fields=['paused_by'], name='touch_paused_by'), models.Index(condition=models.Q(('state__in', ('failed', 'unknown', 'cancelled'))), fields=['task_id', 'state'], name='touch_rare'), models.Index(condition=models.Q(('reserved_at__isnull', False)), fields=['customer', 'reserved_at'], name='touch_history'), models.Index(condition=models.Q(('reserved_at__isnull', False), models.Q(('chat_id', ''), _negated=True)), fields=['chat_id', 'reserved_at'], name='touch_chat_history'), models.Index(fields=['customer', 'node'], name='touch_waiting'), models.Index(condition=models.Q(('settled_at__isnull', False)), fields=['settled_at'], name='touch_ended'), models.Index(condition=models.Q(('paused_by', ''), _negated=True), fields=['task_id'], name='touch_paused'), models.Index(condition=models.Q(('reason__in', ['quota', 'target_busy', 'target_down']), ('state__in', ('scheduled', 'queued'))), fields=['node', 'chat_id', 'due_at'], name='touch_deferred')],
                    'constraints': [models.CheckConstraint(condition=models.Q(models.Q(('state__in', ('queued', 'running')), ('lease_until__isnull', False)), models.Q(models.Q(('state__in', ('queued', 'running')), _negated=True), ('lease_until__isnull', True)), _connector='OR'), name='touch_leased_iff_lease'), models.UniqueConstraint(fields=('event', 'node', 'retry_of'), name='touch_once_an_event', nulls_distinct=False), models.UniqueConstraint(condition=models.Q(('retry_of__isnull', False)), fields=('retry_of',), name='touch_retried_once')],
                },
            ),
            migrations.CreateModel(
                name='EndMark',
                fields=[
                    ('reader', models.CharField(max_length=64, primary_key=True, serialize=False)),
                    ('settled_at', models.DateTimeField()),
                    ('task_id', models.UUIDField()),
                    ('ceiling', models.DateTimeField()),
                    ('ceiling_xid', models.BigIntegerField(default=0)),
                ],
                options={
                    'default_permissions': (),
                },
            ),
            migrations.CreateModel(
                name='HistoricalWebhookSubscription',
                fields=[
                    ('id', models.BigIntegerField(auto_created=True, blank=True, db_index=True, verbose_name='ID')),
                    ('version', models.PositiveIntegerField(default=1, editable=False, verbose_name='version')),
                    ('key', models.CharField(db_index=True, max_length=64, validators=[scheduling.models.versioned.Bound(scheduling.errors.check_key)], verbose_name='key')),
                    ('events', models.JSONField(default=list, verbose_name='events')),
                    ('filter', models.JSONField(blank=True, default=dict, verbose_name='filter')),
                    ('enabled', models.BooleanField(default=True, verbose_name='enabled')),
                    ('retired_at', models.DateTimeField(blank=True, editable=False, null=True, verbose_name='retired at')),
                    ('history_id', models.AutoField(primary_key=True, serialize=False)),
                    ('history_date', models.DateTimeField(db_index=True)),
                    ('history_change_reason', models.CharField(max_length=100, null=True)),
                    ('history_type', models.CharField(choices=[('+', 'Created'), ('~', 'Changed'), ('-', 'Deleted')], max_length=1)),
                    ('history_user', models.ForeignKey(null=True, on_delete=django.db.models.deletion.SET_NULL, related_name='+', to=settings.AUTH_USER_MODEL)),
                ],
                options={
                    'verbose_name': 'historical webhook',
                    'verbose_name_plural': 'historical webhooks',
                    'ordering': ('-history_date', '-history_id'),
                    'get_latest_by': ('history_date', 'history_id'),
                },
                bases=(simple_history.models.HistoricalChanges, models.Model),
            ),
            migrations.CreateModel(
                name='WebhookSubscription',
                fields=[
                    ('id', models.BigAutoField(auto_created=True, primary_key=True, serialize=False, verbose_name='ID')),
                    ('version', models.PositiveIntegerField(default=1, editable=False, verbose_name='version')),
                    ('key', models.CharField(max_length=64, unique=True, validators=[scheduling.models.versioned.Bound(scheduling.errors.check_key)], verbose_name='key')),
                    ('config', scheduling.models.encrypted.EncryptedJSONField(blank=True, default=dict, verbose_name='settings')),
                    ('events', models.JSONField(default=list, verbose_name='events')),
                    ('filter', models.JSONField(blank=True, default=dict, verbose_name='filter')),
                    ('enabled', models.BooleanField(default=True, verbose_name='enabled')),
                    ('retired_at', models.DateTimeField(blank=True, editable=False, null=True, verbose_name='retired at')),
                ],
                options={
                    'verbose_name': 'webhook',
                    'verbose_name_plural': 'webhooks',
                    'ordering': ['key'],
                },
            ),
            migrations.CreateModel(
                name='WebhookEndpoint',
                fields=[
                    ('subscription', models.OneToOneField(on_delete=django.db.models.deletion.CASCADE, primary_key=True, related_name='endpoint', serialize=False, to='scheduling.webhooksubscription', verbose_name='webhook')),
                    ('failures', models.PositiveIntegerField(default=0, verbose_name='failures in a row')),
                    ('failing_since', models.DateTimeField(null=True, verbose_name='failing since')),
                    ('rest_until', models.DateTimeField(null=True, verbose_name='rests until')),
                    ('paused_at', models.DateTimeField(null=True, verbose_name='paused at')),
                    ('disabled_at', models.DateTimeField(null=True, verbose_name='disabled at')),
                    ('problem', models.CharField(blank=True, max_length=300, verbose_name='last error')),
                    ('problem_at', models.DateTimeField(null=True, verbose_name='last error at')),
                    ('delivered_at', models.DateTimeField(null=True, verbose_name='last success at')),
                ],
                options={
                    'verbose_name': 'webhook endpoint',
                    'verbose_name_plural': 'webhook endpoints',
                    'default_permissions': (),
                },
            ),
            migrations.CreateModel(
                name='WebhookFact',
                fields=[
                    ('id', models.BigAutoField(auto_created=True, primary_key=True, serialize=False, verbose_name='ID')),
                    ('type', models.CharField(choices=[('touch.ended', 'A touch ended'), ('touch.receipt', 'A receipt of a sent message'), ('job.ended', 'An RPA job ended'), ('failed_task.opened', 'A failed task was opened'), ('failed_task.settled', 'A failed task was handled'), ('shop.login_needed', 'A shop needs a login'), ('shop.logged_in', 'A shop was logged in again'), ('session.silent', 'A live chat fell silent'), ('pause.changed', 'A pause started or ended')], max_length=40)),
                    ('object_key', models.CharField(max_length=200)),
                    ('at', models.DateTimeField()),
                    ('data', models.JSONField()),
                ],
                options={
                    'default_permissions': (),
                },
            ),
            migrations.CreateModel(
                name='WebhookMessage',
                fields=[
                    ('id', models.BigAutoField(auto_created=True, primary_key=True, serialize=False, verbose_name='ID')),
                    ('subscription', models.ForeignKey(db_constraint=False, db_index=False, on_delete=django.db.models.deletion.CASCADE, related_name='messages', to='scheduling.webhooksubscription', verbose_name='webhook')),
                    ('message_id', models.UUIDField(default=scheduling.ids.new_id, editable=False, verbose_name='message id')),
                    ('type', models.CharField(max_length=40, verbose_name='event')),
                    ('object_key', models.CharField(max_length=200, verbose_name='object')),
                    ('occurred_at', models.DateTimeField(verbose_name='occurred at')),
                    ('data', models.JSONField(verbose_name='data')),
                    ('state', models.CharField(choices=[('waiting', 'Waiting'), ('delivered', 'Delivered'), ('given_up', 'Given up')], default='waiting', max_length=10, verbose_name='state')),
                    ('due_at', models.DateTimeField(default=django.utils.timezone.now, verbose_name='next attempt at')),
                    ('attempt', models.PositiveIntegerField(default=0, verbose_name='attempts')),
                    ('first_tried_at', models.DateTimeField(null=True, verbose_name='first attempt at')),
                    ('ended_at', models.DateTimeField(null=True, verbose_name='ended at')),
                    ('status', models.PositiveSmallIntegerField(null=True, verbose_name='status')),
                    ('problem', models.CharField(blank=True, max_length=300, verbose_name='last error')),
                ],
                options={
                    'verbose_name': 'webhook message',
                    'verbose_name_plural': 'webhook messages',
                    'indexes': [models.Index(condition=models.Q(('state', 'waiting')), fields=['subscription', 'due_at', 'id'], name='webhook_due'), models.Index(condition=models.Q(('state', 'waiting')), fields=['subscription', 'object_key', 'id'], name='webhook_order'), models.Index(fields=['subscription', 'occurred_at'], name='webhook_occurred'), models.Index(django.db.models.fields.json.KeyTextTransform('user_id', 'data'), condition=models.Q(models.Q(('state', 'waiting'), _negated=True), ('data__has_key', 'user_id')), name='webhook_user')],
                },
            ),
        ]),
        migrations.RunSQL(CREATE_FUNCTION, 'DROP FUNCTION scheduling_configuration_changed()'),
        *(
            migrations.RunSQL(CREATE_TRIGGER.format(table=table), f'DROP TRIGGER configuration_changed ON {table}')
            for table in EDITED
        ),
        *(
            migrations.RunSQL(
                REFUSE_DELETION.format(table=table, referring=referring, column=column),
                f'DROP FUNCTION {table}_refuse_deletion() CASCADE',
            )
            for table, referring, column in REFERRED
        ),
        migrations.RunSQL(NAME_SEARCH, DROP_NAME_SEARCH),
        migrations.RunSQL(WEBHOOK_FACTS, DROP_WEBHOOK_FACTS),
        migrations.RunPython(create_indexes, migrations.RunPython.noop),
        migrations.RunSQL(PARTITION_TOUCHES, migrations.RunSQL.noop),
        migrations.RunSQL(LOG_FUNCTIONS, 'DROP FUNCTION touch_verdicts, touch_attempts, scheduling_instant'),
        migrations.RunPython(create_partitions, migrations.RunPython.noop),
        *(
            migrations.RunSQL(f'ALTER TABLE {table} SET ({options})', migrations.RunSQL.noop)
            for table, options in STORAGE.items()
        ),
        migrations.RunSQL(APPEND_ONLY, DROP_APPEND_ONLY),
    ]
