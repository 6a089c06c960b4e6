"""Create the tables, the triggers of the configuration version and of references, and the options of busy tables."""

import datetime
import django.core.validators
import django.db.models.deletion
import django.utils.timezone
import scheduling.ids
import scheduling.models.encrypted
import simple_history.models
from django.conf import settings
from django.db import migrations, models

# The tables that operators edit. A bounce writes `scheduling_disabledtarget`: it must not make every process reload.
EDITED = [
    'scheduling_stage',
    'scheduling_template',
    'scheduling_templatetext',
    'scheduling_channelconfig',
    'scheduling_node',
    'scheduling_delayrule',
    'scheduling_harassmentrule',
    'scheduling_pause',
    'scheduling_eventtype',
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

# By default PostgreSQL vacuums a table after a fifth of it has changed: of a hundred million rows, after twenty million.
UPDATED = (
    'autovacuum_vacuum_scale_factor = 0.02, autovacuum_vacuum_threshold = 5000, autovacuum_analyze_scale_factor = 0.02'
)
APPENDED = f'autovacuum_vacuum_insert_scale_factor = 0.02, autovacuum_vacuum_insert_threshold = 20000, {UPDATED}'
# Workers update a touch and a customer several times: free space in the page keeps the new version there.
STORAGE = {
    'scheduling_touch': f'fillfactor = 70, {UPDATED}',
    'scheduling_event': APPENDED,
    'scheduling_verdict': APPENDED,
    'scheduling_attempt': APPENDED,
    'scheduling_customer': f'fillfactor = 85, {UPDATED}',
    'scheduling_failedtask': UPDATED,
}


class Migration(migrations.Migration):

    initial = True

    dependencies = [
        migrations.swappable_dependency(settings.AUTH_USER_MODEL),
    ]

    operations = [
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
            name='ChannelConfig',
            fields=[
                ('id', models.BigAutoField(auto_created=True, primary_key=True, serialize=False, verbose_name='ID')),
                ('version', models.PositiveIntegerField(default=1, editable=False, verbose_name='version')),
                ('key', models.CharField(max_length=64, unique=True, validators=[django.core.validators.RegexValidator('^[a-z0-9][a-z0-9_.-]{0,63}\\Z', 'Lower-case letters, digits, “-”, “_” and “.”, at most 64.')], verbose_name='key')),
                ('kind', models.CharField(max_length=40, verbose_name='kind')),
                ('config', scheduling.models.encrypted.EncryptedJSONField(blank=True, default=dict, verbose_name='settings')),
                ('idempotent', models.BooleanField(default=False, help_text='A repeat with the same delivery key has no second effect, so an unknown outcome may be retried.', verbose_name='idempotent')),
                ('timeout', models.DurationField(default=datetime.timedelta(seconds=10), verbose_name='timeout')),
                ('retry_delays', models.JSONField(blank=True, default=list, verbose_name='retry delays in seconds')),
                ('retired_at', models.DateTimeField(blank=True, editable=False, null=True, verbose_name='retired at')),
            ],
            options={
                'verbose_name': 'channel',
                'verbose_name_plural': 'channels',
                'ordering': ['key'],
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
            name='Configuration',
            fields=[
                ('id', models.BigAutoField(auto_created=True, primary_key=True, serialize=False, verbose_name='ID')),
                ('version', models.BigIntegerField(default=1)),
                ('changed_at', models.DateTimeField(auto_now=True)),
            ],
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
            name='Stage',
            fields=[
                ('id', models.BigAutoField(auto_created=True, primary_key=True, serialize=False, verbose_name='ID')),
                ('key', models.CharField(max_length=64, unique=True, validators=[django.core.validators.RegexValidator('^[a-z0-9][a-z0-9_.-]{0,63}\\Z', 'Lower-case letters, digits, “-”, “_” and “.”, at most 64.')], verbose_name='key')),
                ('name', models.CharField(blank=True, max_length=100, verbose_name='name')),
                ('position', models.PositiveSmallIntegerField(default=0, verbose_name='position')),
                ('retired_at', models.DateTimeField(blank=True, editable=False, null=True, verbose_name='retired at')),
            ],
            options={
                'verbose_name': 'stage',
                'verbose_name_plural': 'stages',
                'ordering': ['position', 'key'],
            },
        ),
        migrations.CreateModel(
            name='Template',
            fields=[
                ('id', models.BigAutoField(auto_created=True, primary_key=True, serialize=False, verbose_name='ID')),
                ('version', models.PositiveIntegerField(default=1, editable=False, verbose_name='version')),
                ('key', models.CharField(max_length=64, unique=True, validators=[django.core.validators.RegexValidator('^[a-z0-9][a-z0-9_.-]{0,63}\\Z', 'Lower-case letters, digits, “-”, “_” and “.”, at most 64.')], verbose_name='key')),
                ('content_type', models.CharField(help_text='The same type is not sent twice within the dedupe window.', max_length=64, verbose_name='content type')),
                ('category', models.CharField(choices=[('marketing', 'Marketing (blocked by opt-out)'), ('service', 'Service')], default='marketing', max_length=10, verbose_name='category')),
                ('retired_at', models.DateTimeField(blank=True, editable=False, null=True, verbose_name='retired at')),
            ],
            options={
                'verbose_name': 'template',
                'verbose_name_plural': 'templates',
                'ordering': ['key'],
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
                ('last_active_at', models.DateTimeField(blank=True, null=True, verbose_name='last active at')),
                ('conversation_at', models.DateTimeField(blank=True, null=True, verbose_name='conversation at')),
                ('inactive_since', models.DateTimeField(blank=True, null=True, verbose_name='inactive since')),
                ('created_at', models.DateTimeField(default=django.utils.timezone.now, editable=False, verbose_name='created at')),
            ],
            options={
                'verbose_name': 'customer',
                'verbose_name_plural': 'customers',
                'indexes': [models.Index(condition=models.Q(('last_active_at__isnull', False), models.Q(('inactive_since__isnull', True), models.Q(('inactive_since', models.F('last_active_at')), _negated=True), _connector='OR')), fields=['last_active_at'], name='customer_present'), models.Index(condition=models.Q(('opted_out', True)), fields=['opted_out_at'], name='customer_opted_out')],
            },
        ),
        migrations.CreateModel(
            name='DelayRule',
            fields=[
                ('id', models.BigAutoField(auto_created=True, primary_key=True, serialize=False, verbose_name='ID')),
                ('version', models.PositiveIntegerField(default=1, editable=False, verbose_name='version')),
                ('by_level', models.JSONField(blank=True, default=dict, verbose_name='seconds by level')),
                ('default', models.DurationField(default=datetime.timedelta(days=1), verbose_name='otherwise')),
                ('active_within', models.DurationField(default=datetime.timedelta(days=1), verbose_name='active within')),
                ('active_factor', models.FloatField(default=0.6, validators=[django.core.validators.MinValueValidator(0.01), django.core.validators.MaxValueValidator(10)], verbose_name='factor when active')),
            ],
            options={
                'verbose_name': 'delay rule',
                'verbose_name_plural': 'delay rules',
                'constraints': [models.CheckConstraint(condition=models.Q(('pk', 1)), name='one_delay_rule')],
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
                ('user_id', models.CharField(max_length=200, verbose_name='user id')),
                ('chat_id', models.CharField(blank=True, max_length=200, verbose_name='chat id')),
                ('data', models.JSONField(default=dict, verbose_name='data')),
                ('customer', models.ForeignKey(db_constraint=False, db_index=False, on_delete=django.db.models.deletion.PROTECT, related_name='events', to='scheduling.customer', verbose_name='customer')),
                ('trace_id', models.UUIDField(editable=False, null=True, verbose_name='trace id')),
            ],
            options={
                'verbose_name': 'event',
                'verbose_name_plural': 'events',
                'indexes': [models.Index(fields=['customer', 'type', 'occurred_at'], name='event_of_customer'), models.Index(condition=models.Q(('trace_id__isnull', False)), fields=['trace_id'], name='event_traced')],
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
                ('actor_name', models.CharField(blank=True, max_length=150, verbose_name='actor')),
                ('action_reason', models.CharField(blank=True, max_length=500, verbose_name='reason of the action')),
                ('retried_as', models.UUIDField(null=True, verbose_name='published again as')),
                ('actor', models.ForeignKey(null=True, on_delete=django.db.models.deletion.SET_NULL, to=settings.AUTH_USER_MODEL, verbose_name='actor')),
            ],
            options={
                'verbose_name': 'failed task',
                'verbose_name_plural': 'failed tasks',
                'ordering': ['-failed_at'],
                'permissions': [('act_on_failedtask', 'Can retry, resolve, ignore and archive failed tasks')],
                'indexes': [models.Index(condition=models.Q(('state', 'open')), fields=['-failed_at'], name='failed_open'), models.Index(condition=models.Q(('state', 'retried')), fields=['fingerprint', 'acted_at'], name='failed_retried')],
            },
        ),
        migrations.CreateModel(
            name='HarassmentRule',
            fields=[
                ('id', models.BigAutoField(auto_created=True, primary_key=True, serialize=False, verbose_name='ID')),
                ('version', models.PositiveIntegerField(default=1, editable=False, verbose_name='version')),
                ('kind', models.CharField(choices=[('cap', 'At most so many in a rolling window'), ('dedupe', 'The same content type not again within a window'), ('conversation', 'Not into a new conversation'), ('quiet_hours', 'Not during quiet hours')], max_length=20, verbose_name='kind')),
                ('scope', models.CharField(choices=[('user', 'Customer'), ('community', 'Community')], default='user', max_length=10, verbose_name='counted for')),
                ('limit', models.PositiveIntegerField(blank=True, null=True, verbose_name='limit')),
                ('window', models.DurationField(blank=True, null=True, verbose_name='window')),
                ('quiet_from', models.TimeField(blank=True, null=True, verbose_name='quiet from')),
                ('quiet_to', models.TimeField(blank=True, null=True, verbose_name='quiet to')),
                ('timezone', models.CharField(default='Asia/Shanghai', max_length=60, verbose_name='time zone')),
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
            name='HistoricalChannelConfig',
            fields=[
                ('id', models.BigIntegerField(auto_created=True, blank=True, db_index=True, verbose_name='ID')),
                ('version', models.PositiveIntegerField(default=1, editable=False, verbose_name='version')),
                ('key', models.CharField(db_index=True, max_length=64, validators=[django.core.validators.RegexValidator('^[a-z0-9][a-z0-9_.-]{0,63}\\Z', 'Lower-case letters, digits, “-”, “_” and “.”, at most 64.')], verbose_name='key')),
                ('kind', models.CharField(max_length=40, verbose_name='kind')),
                ('idempotent', models.BooleanField(default=False, help_text='A repeat with the same delivery key has no second effect, so an unknown outcome may be retried.', verbose_name='idempotent')),
                ('timeout', models.DurationField(default=datetime.timedelta(seconds=10), verbose_name='timeout')),
                ('retry_delays', models.JSONField(blank=True, default=list, verbose_name='retry delays in seconds')),
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
            name='HistoricalDelayRule',
            fields=[
                ('id', models.BigIntegerField(auto_created=True, blank=True, db_index=True, verbose_name='ID')),
                ('version', models.PositiveIntegerField(default=1, editable=False, verbose_name='version')),
                ('by_level', models.JSONField(blank=True, default=dict, verbose_name='seconds by level')),
                ('default', models.DurationField(default=datetime.timedelta(days=1), verbose_name='otherwise')),
                ('active_within', models.DurationField(default=datetime.timedelta(days=1), verbose_name='active within')),
                ('active_factor', models.FloatField(default=0.6, validators=[django.core.validators.MinValueValidator(0.01), django.core.validators.MaxValueValidator(10)], verbose_name='factor when active')),
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
            name='HistoricalHarassmentRule',
            fields=[
                ('id', models.BigIntegerField(auto_created=True, blank=True, db_index=True, verbose_name='ID')),
                ('version', models.PositiveIntegerField(default=1, editable=False, verbose_name='version')),
                ('kind', models.CharField(choices=[('cap', 'At most so many in a rolling window'), ('dedupe', 'The same content type not again within a window'), ('conversation', 'Not into a new conversation'), ('quiet_hours', 'Not during quiet hours')], max_length=20, verbose_name='kind')),
                ('scope', models.CharField(choices=[('user', 'Customer'), ('community', 'Community')], default='user', max_length=10, verbose_name='counted for')),
                ('limit', models.PositiveIntegerField(blank=True, null=True, verbose_name='limit')),
                ('window', models.DurationField(blank=True, null=True, verbose_name='window')),
                ('quiet_from', models.TimeField(blank=True, null=True, verbose_name='quiet from')),
                ('quiet_to', models.TimeField(blank=True, null=True, verbose_name='quiet to')),
                ('timezone', models.CharField(default='Asia/Shanghai', max_length=60, verbose_name='time zone')),
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
            name='HistoricalTemplate',
            fields=[
                ('id', models.BigIntegerField(auto_created=True, blank=True, db_index=True, verbose_name='ID')),
                ('version', models.PositiveIntegerField(default=1, editable=False, verbose_name='version')),
                ('key', models.CharField(db_index=True, max_length=64, validators=[django.core.validators.RegexValidator('^[a-z0-9][a-z0-9_.-]{0,63}\\Z', 'Lower-case letters, digits, “-”, “_” and “.”, at most 64.')], verbose_name='key')),
                ('content_type', models.CharField(help_text='The same type is not sent twice within the dedupe window.', max_length=64, verbose_name='content type')),
                ('category', models.CharField(choices=[('marketing', 'Marketing (blocked by opt-out)'), ('service', 'Service')], default='marketing', max_length=10, verbose_name='category')),
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
            name='Pause',
            fields=[
                ('id', models.BigAutoField(auto_created=True, primary_key=True, serialize=False, verbose_name='ID')),
                ('scope', models.CharField(max_length=120, unique=True, verbose_name='scope')),
                ('reason', models.CharField(blank=True, max_length=200, verbose_name='reason')),
                ('paused_at', models.DateTimeField(default=django.utils.timezone.now, editable=False, verbose_name='paused at')),
                ('paused_by', models.ForeignKey(null=True, on_delete=django.db.models.deletion.SET_NULL, to=settings.AUTH_USER_MODEL, verbose_name='paused by')),
            ],
            options={
                'verbose_name': 'pause',
                'verbose_name_plural': 'pauses',
            },
        ),
        migrations.CreateModel(
            name='Node',
            fields=[
                ('id', models.BigAutoField(auto_created=True, primary_key=True, serialize=False, verbose_name='ID')),
                ('version', models.PositiveIntegerField(default=1, editable=False, verbose_name='version')),
                ('key', models.CharField(max_length=64, unique=True, validators=[django.core.validators.RegexValidator('^[a-z0-9][a-z0-9_.-]{0,63}\\Z', 'Lower-case letters, digits, “-”, “_” and “.”, at most 64.')], verbose_name='key')),
                ('trigger', models.CharField(max_length=120, verbose_name='trigger event')),
                ('delay', models.DurationField(default=datetime.timedelta(0), verbose_name='delay')),
                ('dynamic', models.BooleanField(default=False, verbose_name='dynamic delay')),
                ('delay_rules', models.JSONField(blank=True, null=True, verbose_name='own delay rules')),
                ('priority', models.SmallIntegerField(choices=[(0, 'High'), (1, 'Normal'), (2, 'Low')], default=1, verbose_name='priority')),
                ('enabled', models.BooleanField(default=True, verbose_name='enabled')),
                ('rollout_percent', models.FloatField(default=100, validators=[django.core.validators.MinValueValidator(0), django.core.validators.MaxValueValidator(100)], verbose_name='rollout, percent of communities')),
                ('rollout_communities', models.JSONField(blank=True, default=list, verbose_name='rollout, always these communities')),
                ('over_cap', models.CharField(choices=[('suppress', 'Suppress'), ('defer', 'Defer to the next eligible time')], default='suppress', max_length=10, verbose_name='over the cap')),
                ('expires_after', models.DurationField(default=datetime.timedelta(days=3), verbose_name='expires after')),
                ('canary_percent', models.FloatField(default=0, validators=[django.core.validators.MinValueValidator(0), django.core.validators.MaxValueValidator(100)], verbose_name='canary, percent of communities')),
                ('canary_communities', models.JSONField(blank=True, default=list, verbose_name='canary, always these communities')),
                ('cancel_on', models.JSONField(blank=True, default=list, verbose_name='cancelled by these events')),
                ('on_repeat', models.CharField(choices=[('each', 'Each event counts'), ('keep', 'Keep the one that waits'), ('restart', 'Restart the wait')], default='each', max_length=10, verbose_name='on repetition')),
                ('goal_event', models.CharField(blank=True, max_length=120, verbose_name='goal event')),
                ('goal_within', models.DurationField(blank=True, null=True, verbose_name='goal within')),
                ('holdout_percent', models.FloatField(default=0, validators=[django.core.validators.MinValueValidator(0), django.core.validators.MaxValueValidator(100)], verbose_name='hold-out, percent of customers')),
                ('guard_cap', models.CharField(choices=[('apply', 'Apply'), ('count_only', 'Send anyway, but count it'), ('ignore', 'Ignore')], default='apply', max_length=10, verbose_name='cap')),
                ('guard_dedupe', models.CharField(choices=[('apply', 'Apply'), ('ignore', 'Ignore')], default='apply', max_length=10, verbose_name='same content')),
                ('guard_conversation', models.CharField(choices=[('apply', 'Apply'), ('ignore', 'Ignore')], default='apply', max_length=10, verbose_name='live conversation')),
                ('guard_quiet_hours', models.CharField(choices=[('apply', 'Apply'), ('ignore', 'Ignore')], default='apply', max_length=10, verbose_name='quiet hours')),
                ('retired_at', models.DateTimeField(blank=True, editable=False, null=True, verbose_name='retired at')),
                ('channel', models.ForeignKey(on_delete=django.db.models.deletion.PROTECT, related_name='nodes', to='scheduling.channelconfig', verbose_name='channel')),
                ('stage', models.ForeignKey(on_delete=django.db.models.deletion.PROTECT, related_name='nodes', to='scheduling.stage', verbose_name='stage')),
                ('canary_template', models.ForeignKey(blank=True, null=True, on_delete=django.db.models.deletion.PROTECT, related_name='canary_nodes', to='scheduling.template', verbose_name='canary template')),
                ('template', models.ForeignKey(on_delete=django.db.models.deletion.PROTECT, related_name='nodes', to='scheduling.template', verbose_name='template')),
                ('canary_guard', models.JSONField(blank=True, null=True, verbose_name='canary, plan of a guarded roll-out')),
            ],
            options={
                'verbose_name': 'service node',
                'verbose_name_plural': 'service nodes',
                'ordering': ['stage__position', 'trigger', 'key'],
            },
        ),
        migrations.CreateModel(
            name='HistoricalTemplateText',
            fields=[
                ('id', models.BigIntegerField(auto_created=True, blank=True, db_index=True, verbose_name='ID')),
                ('locale', models.CharField(default='zh-hans', max_length=20, verbose_name='locale')),
                ('subject', models.CharField(blank=True, max_length=200, verbose_name='subject')),
                ('body', models.TextField(verbose_name='body')),
                ('history_id', models.AutoField(primary_key=True, serialize=False)),
                ('history_date', models.DateTimeField(db_index=True)),
                ('history_change_reason', models.CharField(max_length=100, null=True)),
                ('history_type', models.CharField(choices=[('+', 'Created'), ('~', 'Changed'), ('-', 'Deleted')], max_length=1)),
                ('history_user', models.ForeignKey(null=True, on_delete=django.db.models.deletion.SET_NULL, related_name='+', to=settings.AUTH_USER_MODEL)),
                ('template', models.ForeignKey(blank=True, db_constraint=False, null=True, on_delete=django.db.models.deletion.DO_NOTHING, related_name='+', to='scheduling.template', verbose_name='template')),
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
            name='HistoricalNode',
            fields=[
                ('id', models.BigIntegerField(auto_created=True, blank=True, db_index=True, verbose_name='ID')),
                ('version', models.PositiveIntegerField(default=1, editable=False, verbose_name='version')),
                ('key', models.CharField(db_index=True, max_length=64, validators=[django.core.validators.RegexValidator('^[a-z0-9][a-z0-9_.-]{0,63}\\Z', 'Lower-case letters, digits, “-”, “_” and “.”, at most 64.')], verbose_name='key')),
                ('trigger', models.CharField(max_length=120, verbose_name='trigger event')),
                ('delay', models.DurationField(default=datetime.timedelta(0), verbose_name='delay')),
                ('dynamic', models.BooleanField(default=False, verbose_name='dynamic delay')),
                ('delay_rules', models.JSONField(blank=True, null=True, verbose_name='own delay rules')),
                ('priority', models.SmallIntegerField(choices=[(0, 'High'), (1, 'Normal'), (2, 'Low')], default=1, verbose_name='priority')),
                ('enabled', models.BooleanField(default=True, verbose_name='enabled')),
                ('rollout_percent', models.FloatField(default=100, validators=[django.core.validators.MinValueValidator(0), django.core.validators.MaxValueValidator(100)], verbose_name='rollout, percent of communities')),
                ('rollout_communities', models.JSONField(blank=True, default=list, verbose_name='rollout, always these communities')),
                ('over_cap', models.CharField(choices=[('suppress', 'Suppress'), ('defer', 'Defer to the next eligible time')], default='suppress', max_length=10, verbose_name='over the cap')),
                ('expires_after', models.DurationField(default=datetime.timedelta(days=3), verbose_name='expires after')),
                ('canary_percent', models.FloatField(default=0, validators=[django.core.validators.MinValueValidator(0), django.core.validators.MaxValueValidator(100)], verbose_name='canary, percent of communities')),
                ('canary_communities', models.JSONField(blank=True, default=list, verbose_name='canary, always these communities')),
                ('cancel_on', models.JSONField(blank=True, default=list, verbose_name='cancelled by these events')),
                ('on_repeat', models.CharField(choices=[('each', 'Each event counts'), ('keep', 'Keep the one that waits'), ('restart', 'Restart the wait')], default='each', max_length=10, verbose_name='on repetition')),
                ('goal_event', models.CharField(blank=True, max_length=120, verbose_name='goal event')),
                ('goal_within', models.DurationField(blank=True, null=True, verbose_name='goal within')),
                ('holdout_percent', models.FloatField(default=0, validators=[django.core.validators.MinValueValidator(0), django.core.validators.MaxValueValidator(100)], verbose_name='hold-out, percent of customers')),
                ('guard_cap', models.CharField(choices=[('apply', 'Apply'), ('count_only', 'Send anyway, but count it'), ('ignore', 'Ignore')], default='apply', max_length=10, verbose_name='cap')),
                ('guard_dedupe', models.CharField(choices=[('apply', 'Apply'), ('ignore', 'Ignore')], default='apply', max_length=10, verbose_name='same content')),
                ('guard_conversation', models.CharField(choices=[('apply', 'Apply'), ('ignore', 'Ignore')], default='apply', max_length=10, verbose_name='live conversation')),
                ('guard_quiet_hours', models.CharField(choices=[('apply', 'Apply'), ('ignore', 'Ignore')], default='apply', max_length=10, verbose_name='quiet hours')),
                ('retired_at', models.DateTimeField(blank=True, editable=False, null=True, verbose_name='retired at')),
                ('history_id', models.AutoField(primary_key=True, serialize=False)),
                ('history_date', models.DateTimeField(db_index=True)),
                ('history_change_reason', models.CharField(max_length=100, null=True)),
                ('history_type', models.CharField(choices=[('+', 'Created'), ('~', 'Changed'), ('-', 'Deleted')], max_length=1)),
                ('channel', models.ForeignKey(blank=True, db_constraint=False, null=True, on_delete=django.db.models.deletion.DO_NOTHING, related_name='+', to='scheduling.channelconfig', verbose_name='channel')),
                ('history_user', models.ForeignKey(null=True, on_delete=django.db.models.deletion.SET_NULL, related_name='+', to=settings.AUTH_USER_MODEL)),
                ('stage', models.ForeignKey(blank=True, db_constraint=False, null=True, on_delete=django.db.models.deletion.DO_NOTHING, related_name='+', to='scheduling.stage', verbose_name='stage')),
                ('canary_template', models.ForeignKey(blank=True, db_constraint=False, null=True, on_delete=django.db.models.deletion.DO_NOTHING, related_name='+', to='scheduling.template', verbose_name='canary template')),
                ('template', models.ForeignKey(blank=True, db_constraint=False, null=True, on_delete=django.db.models.deletion.DO_NOTHING, related_name='+', to='scheduling.template', verbose_name='template')),
                ('canary_guard', models.JSONField(blank=True, null=True, verbose_name='canary, plan of a guarded roll-out')),
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
            name='TemplateText',
            fields=[
                ('id', models.BigAutoField(auto_created=True, primary_key=True, serialize=False, verbose_name='ID')),
                ('locale', models.CharField(default='zh-hans', max_length=20, verbose_name='locale')),
                ('subject', models.CharField(blank=True, max_length=200, verbose_name='subject')),
                ('body', models.TextField(verbose_name='body')),
                ('template', models.ForeignKey(on_delete=django.db.models.deletion.CASCADE, related_name='texts', to='scheduling.template', verbose_name='template')),
            ],
            options={
                'verbose_name': 'text',
                'verbose_name_plural': 'texts',
                'ordering': ['locale'],
                'constraints': [models.UniqueConstraint(fields=('template', 'locale'), name='one_text_a_locale')],
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
                ('parked', models.CharField(blank=True, default='', max_length=120, verbose_name='paused by')),
                ('attempt', models.SmallIntegerField(default=0, verbose_name='attempts')),
                ('lease_no', models.IntegerField(default=0, verbose_name='lease number')),
                ('lease_until', models.DateTimeField(null=True, verbose_name='lease until')),
                ('hints', models.SmallIntegerField(default=0, verbose_name='wake-ups')),
                ('queued_at', models.DateTimeField(null=True, verbose_name='dispatched at')),
                ('sending_at', models.DateTimeField(null=True, verbose_name='sending at')),
                ('settled_at', models.DateTimeField(null=True, verbose_name='settled at')),
                ('reason', models.CharField(blank=True, default='', max_length=64, verbose_name='reason')),
                ('created_at', models.DateTimeField(default=django.utils.timezone.now, editable=False, verbose_name='created at')),
                ('state', models.CharField(choices=[('scheduled', 'Scheduled'), ('queued', 'Dispatched'), ('running', 'Running'), ('delivered', 'Delivered'), ('suppressed', 'Suppressed'), ('cancelled', 'Cancelled'), ('failed', 'Failed'), ('unknown', 'Unknown')], default='scheduled', editable=False, max_length=10, verbose_name='state')),
                ('node_version', models.PositiveIntegerField(verbose_name='node version when planned')),
                ('chat_id', models.CharField(blank=True, max_length=200, verbose_name='chat id')),
                ('expires_at', models.DateTimeField(verbose_name='expires at')),
                ('template_version', models.PositiveIntegerField(null=True, verbose_name='template version')),
                ('content_type', models.CharField(blank=True, default='', max_length=64, verbose_name='content type')),
                ('reserved_at', models.DateTimeField(null=True, verbose_name='cap slot reserved at')),
                ('counts_toward_cap', models.BooleanField(default=True, verbose_name='counts toward the cap')),
                ('customer', models.ForeignKey(db_constraint=False, db_index=False, on_delete=django.db.models.deletion.PROTECT, related_name='touches', to='scheduling.customer', verbose_name='customer')),
                ('event', models.ForeignKey(db_constraint=False, db_index=False, on_delete=django.db.models.deletion.PROTECT, related_name='touches', to='scheduling.event', verbose_name='event')),
                ('node', models.ForeignKey(db_constraint=False, db_index=False, on_delete=django.db.models.deletion.PROTECT, related_name='touches', to='scheduling.node', verbose_name='node')),
                ('template', models.ForeignKey(db_constraint=False, db_index=False, null=True, on_delete=django.db.models.deletion.PROTECT, related_name='touches', to='scheduling.template', verbose_name='template')),
            ],
            options={
                'verbose_name': 'touch',
                'verbose_name_plural': 'touches',
                'indexes': [models.Index(condition=models.Q(('parked', ''), ('state', 'scheduled')), fields=['priority', 'due_at'], name='touch_due'), models.Index(condition=models.Q(('state__in', ('queued', 'running'))), fields=['lease_until'], name='touch_leased'), models.Index(condition=models.Q(('parked', ''), _negated=True), fields=['parked'], name='touch_parked'), models.Index(condition=models.Q(('reserved_at__isnull', False)), fields=['customer', 'reserved_at'], name='touch_history'), models.Index(condition=models.Q(('reserved_at__isnull', False), models.Q(('chat_id', ''), _negated=True)), fields=['chat_id', 'reserved_at'], name='touch_chat_history'), models.Index(condition=models.Q(('state__in', ['scheduled', 'queued', 'running'])), fields=['customer', 'node'], name='touch_waiting'), models.Index(condition=models.Q(('settled_at__isnull', False)), fields=['settled_at'], name='touch_ended'), models.Index(condition=models.Q(('state__in', ('failed', 'unknown', 'cancelled'))), fields=['task_id', 'state'], name='touch_rare'), models.Index(condition=models.Q(('parked', ''), _negated=True), fields=['task_id'], name='touch_paused')],
                'constraints': [models.CheckConstraint(condition=models.Q(models.Q(('state__in', ('queued', 'running')), ('lease_until__isnull', False)), models.Q(models.Q(('state__in', ('queued', 'running')), _negated=True), ('lease_until__isnull', True)), _connector='OR'), name='touch_leased_iff_lease'), models.UniqueConstraint(fields=('event', 'node', 'retry_of'), name='touch_once_an_event', nulls_distinct=False), models.UniqueConstraint(condition=models.Q(('retry_of__isnull', False)), fields=('retry_of',), name='touch_retried_once')],
            },
        ),
        migrations.CreateModel(
            name='Complaint',
            fields=[
                ('id', models.BigAutoField(auto_created=True, primary_key=True, serialize=False, verbose_name='ID')),
                ('complained_at', models.DateTimeField(verbose_name='complained at')),
                ('customer', models.ForeignKey(on_delete=django.db.models.deletion.CASCADE, to='scheduling.customer', verbose_name='customer')),
                ('event', models.OneToOneField(on_delete=django.db.models.deletion.CASCADE, to='scheduling.event', verbose_name='event')),
                ('touch', models.ForeignKey(null=True, on_delete=django.db.models.deletion.SET_NULL, related_name='complaints', to='scheduling.touch', verbose_name='touch')),
            ],
            options={
                'verbose_name': 'complaint',
                'verbose_name_plural': 'complaints',
            },
        ),
        migrations.CreateModel(
            name='Attempt',
            fields=[
                ('id', models.BigAutoField(auto_created=True, primary_key=True, serialize=False, verbose_name='ID')),
                ('number', models.SmallIntegerField(verbose_name='number')),
                ('lease_no', models.IntegerField(verbose_name='lease number')),
                ('started_at', models.DateTimeField(verbose_name='started at')),
                ('ended_at', models.DateTimeField(null=True, verbose_name='ended at')),
                ('outcome', models.CharField(choices=[('delivered', 'Delivered'), ('transient', 'Failed, may succeed later'), ('permanent', 'Failed for good'), ('unknown', 'Unknown')], max_length=10, verbose_name='outcome')),
                ('reason', models.CharField(blank=True, max_length=64, verbose_name='reason')),
                ('detail', models.TextField(blank=True, verbose_name='detail')),
                ('status', models.IntegerField(null=True, verbose_name='status')),
                ('subject', models.TextField(blank=True, verbose_name='subject')),
                ('body', models.TextField(blank=True, verbose_name='body')),
                ('touch', models.ForeignKey(db_constraint=False, on_delete=django.db.models.deletion.CASCADE, related_name='attempts', to='scheduling.touch', verbose_name='touch')),
            ],
            options={
                'verbose_name': 'attempt',
                'verbose_name_plural': 'attempts',
                'ordering': ['id'],
            },
        ),
        migrations.CreateModel(
            name='Verdict',
            fields=[
                ('id', models.BigAutoField(auto_created=True, primary_key=True, serialize=False, verbose_name='ID')),
                ('at', models.DateTimeField(verbose_name='at')),
                ('decision', models.CharField(choices=[('send', 'Send'), ('hold', 'Defer'), ('suppress', 'Suppress')], max_length=10, verbose_name='decision')),
                ('rule', models.CharField(blank=True, max_length=64, verbose_name='rule')),
                ('rule_version', models.IntegerField(null=True, verbose_name='rule version')),
                ('observed', models.CharField(blank=True, max_length=200, verbose_name='observed')),
                ('limit', models.CharField(blank=True, max_length=200, verbose_name='limit')),
                ('next_eligible_at', models.DateTimeField(null=True, verbose_name='next eligible at')),
                ('touch', models.ForeignKey(db_constraint=False, on_delete=django.db.models.deletion.CASCADE, related_name='verdicts', to='scheduling.touch', verbose_name='touch')),
            ],
            options={
                'verbose_name': 'verdict',
                'verbose_name_plural': 'verdicts',
                'ordering': ['id'],
            },
        ),
        migrations.CreateModel(
            name='DisabledTarget',
            fields=[
                ('id', models.BigAutoField(auto_created=True, primary_key=True, serialize=False, verbose_name='ID')),
                ('target_digest', models.CharField(help_text='SHA-256 of the address', max_length=64, verbose_name='target')),
                ('chat_id', models.CharField(blank=True, max_length=200, verbose_name='chat id')),
                ('reason', models.CharField(blank=True, max_length=200, verbose_name='reason')),
                ('disabled_at', models.DateTimeField(auto_now_add=True, verbose_name='disabled at')),
                ('channel', models.ForeignKey(on_delete=django.db.models.deletion.CASCADE, to='scheduling.channelconfig', verbose_name='channel')),
            ],
            options={
                'verbose_name': 'disabled target',
                'verbose_name_plural': 'disabled targets',
                'constraints': [models.UniqueConstraint(fields=('channel', 'target_digest'), name='disabled_once')],
                'indexes': [models.Index(fields=['disabled_at'], name='disabled_since'), models.Index(fields=['target_digest'], name='disabled_address')],
            },
        ),
        migrations.CreateModel(
            name='FailedLogin',
            fields=[
                ('id', models.BigAutoField(auto_created=True, primary_key=True, serialize=False, verbose_name='ID')),
                ('digest', models.CharField(editable=False, max_length=64)),
                ('address', models.CharField(editable=False, max_length=45, verbose_name='address')),
                ('tries', models.PositiveIntegerField(editable=False, verbose_name='failed attempts')),
                ('last_at', models.DateTimeField(db_index=True, editable=False, verbose_name='last attempt')),
                ('user', models.ForeignKey(editable=False, null=True, on_delete=django.db.models.deletion.CASCADE, to=settings.AUTH_USER_MODEL, verbose_name='user')),
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
            name='WhatIfRun',
            fields=[
                ('id', models.BigAutoField(auto_created=True, primary_key=True, serialize=False, verbose_name='ID')),
                ('state', models.CharField(choices=[('waiting', 'Waiting for a worker'), ('running', 'Running'), ('done', 'Replayed'), ('failed', 'Failed'), ('published', 'Published'), ('discarded', 'Discarded')], default='waiting', editable=False, max_length=10, verbose_name='state')),
                ('draft', models.TextField(verbose_name='draft')),
                ('days', models.PositiveSmallIntegerField(verbose_name='days')),
                ('actor_name', models.CharField(max_length=150, verbose_name='who')),
                ('created_at', models.DateTimeField(default=django.utils.timezone.now, editable=False, verbose_name='started at')),
                ('changes', models.JSONField(default=list, verbose_name='changes')),
                ('tries', models.PositiveSmallIntegerField(default=0, verbose_name='tries')),
                ('done', models.PositiveIntegerField(default=0, verbose_name='events replayed')),
                ('total', models.PositiveIntegerField(default=0, verbose_name='events')),
                ('beat_at', models.DateTimeField(null=True, verbose_name='last heard of at')),
                ('ended_at', models.DateTimeField(null=True, verbose_name='replayed at')),
                ('live_digest', models.CharField(blank=True, max_length=64, verbose_name='live configuration')),
                ('result', models.JSONField(null=True, verbose_name='result')),
                ('problem', models.TextField(blank=True, verbose_name='problem')),
                ('settled_by', models.CharField(blank=True, max_length=150, verbose_name='decided by')),
                ('settled_at', models.DateTimeField(null=True, verbose_name='decided at')),
                ('actor', models.ForeignKey(null=True, on_delete=django.db.models.deletion.SET_NULL, related_name='+', to=settings.AUTH_USER_MODEL, verbose_name='who')),
            ],
            options={
                'verbose_name': 'what-if replay',
                'verbose_name_plural': 'what-if replays',
                'ordering': ['-id'],
                'permissions': [('publish_whatifrun', 'Can publish a draft that was replayed')],
            },
        ),
        migrations.CreateModel(
            name='BulkAction',
            fields=[
                ('id', models.UUIDField(default=scheduling.ids.new_id, editable=False, primary_key=True, serialize=False)),
                ('action', models.CharField(max_length=20, verbose_name='action')),
                ('filter', models.JSONField(default=dict, verbose_name='filter')),
                ('as_of', models.DateTimeField(default=django.utils.timezone.now, verbose_name='rows from before')),
                ('actor_name', models.CharField(max_length=150, verbose_name='who')),
                ('reason', models.CharField(blank=True, max_length=500, verbose_name='reason')),
                ('per_second', models.FloatField(verbose_name='rate per second')),
                ('state', models.CharField(choices=[('running', 'Under way'), ('done', 'Done'), ('cancelled', 'Cancelled'), ('failed', 'Failed')], default='running', max_length=10, verbose_name='state')),
                ('begun_at', models.DateTimeField(default=django.utils.timezone.now, verbose_name='started at')),
                ('ended_at', models.DateTimeField(null=True, verbose_name='ended at')),
                ('ended_by', models.CharField(blank=True, max_length=150, verbose_name='cancelled by')),
                ('total', models.PositiveIntegerField(null=True, verbose_name='rows')),
                ('done', models.PositiveIntegerField(default=0, verbose_name='done')),
                ('skipped', models.PositiveIntegerField(default=0, verbose_name='skipped')),
                ('failed', models.PositiveIntegerField(default=0, verbose_name='could not be done')),
                ('position', models.UUIDField(null=True)),
                ('next_at', models.DateTimeField(default=django.utils.timezone.now)),
                ('tries', models.PositiveSmallIntegerField(default=0)),
                ('note', models.TextField(blank=True, verbose_name='note')),
                ('actor', models.ForeignKey(null=True, on_delete=django.db.models.deletion.SET_NULL, related_name='+', to=settings.AUTH_USER_MODEL, verbose_name='who')),
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
            name='SavedFilter',
            fields=[
                ('id', models.BigAutoField(auto_created=True, primary_key=True, serialize=False, verbose_name='ID')),
                ('listed', models.CharField(max_length=40)),
                ('name', models.CharField(max_length=60, verbose_name='name')),
                ('query', models.CharField(max_length=2000)),
                ('shared', models.BooleanField(default=False, verbose_name='for all users')),
                ('created_at', models.DateTimeField(default=django.utils.timezone.now)),
                ('owner', models.ForeignKey(on_delete=django.db.models.deletion.CASCADE, related_name='+', to=settings.AUTH_USER_MODEL)),
            ],
            options={
                'verbose_name': 'saved filter',
                'verbose_name_plural': 'saved filters',
                'ordering': ['name', 'id'],
                'default_permissions': (),
                'constraints': [models.UniqueConstraint(fields=('owner', 'listed', 'name'), name='saved_filter_once')],
            },
        ),
        migrations.CreateModel(
            name='GuardedRollout',
            fields=[
                ('id', models.BigAutoField(auto_created=True, primary_key=True, serialize=False, verbose_name='ID')),
                ('stable_version', models.PositiveIntegerField(verbose_name='version of the stable template')),
                ('canary_version', models.PositiveIntegerField(verbose_name='version of the canary template')),
                ('plan', models.JSONField(verbose_name='plan')),
                ('communities', models.JSONField(default=list, verbose_name='canary, always these communities')),
                ('state', models.CharField(choices=[('running', 'Running'), ('paused', 'Paused'), ('finished', 'Finished'), ('stopped', 'Stopped')], default='running', max_length=10, verbose_name='state')),
                ('step', models.PositiveSmallIntegerField(default=0, verbose_name='step')),
                ('reason', models.CharField(blank=True, max_length=64, verbose_name='reason')),
                ('figures', models.JSONField(default=dict, verbose_name='figures')),
                ('started_at', models.DateTimeField(default=django.utils.timezone.now, verbose_name='started at')),
                ('step_at', models.DateTimeField(default=django.utils.timezone.now, verbose_name='step since')),
                ('judged_at', models.DateTimeField(null=True, verbose_name='judged at')),
                ('ended_at', models.DateTimeField(null=True, verbose_name='ended at')),
                ('canary', models.ForeignKey(on_delete=django.db.models.deletion.PROTECT, related_name='+', to='scheduling.template', verbose_name='canary template')),
                ('node', models.ForeignKey(on_delete=django.db.models.deletion.CASCADE, related_name='guarded_rollouts', to='scheduling.node', verbose_name='service node')),
                ('stable', models.ForeignKey(on_delete=django.db.models.deletion.PROTECT, related_name='+', to='scheduling.template', verbose_name='stable template')),
                ('counted', models.JSONField(editable=False, null=True)),
            ],
            options={
                'verbose_name': 'guarded roll-out',
                'verbose_name_plural': 'guarded roll-outs',
                'ordering': ['-id'],
                'constraints': [models.UniqueConstraint(condition=models.Q(('state__in', ('running', 'paused'))), fields=('node',), name='one_guarded_rollout')],
            },
        ),
        migrations.CreateModel(
            name='RolloutMove',
            fields=[
                ('id', models.BigAutoField(auto_created=True, primary_key=True, serialize=False, verbose_name='ID')),
                ('at', models.DateTimeField(verbose_name='at')),
                ('verb', models.CharField(choices=[('started', 'Started'), ('grew', 'Grew'), ('paused', 'Paused'), ('resumed', 'Resumed'), ('stopped', 'Stopped'), ('finished', 'Finished')], max_length=10, verbose_name='move')),
                ('reason', models.CharField(blank=True, max_length=64, verbose_name='reason')),
                ('percent', models.FloatField(verbose_name='canary, percent of communities')),
                ('node_version', models.PositiveIntegerField(verbose_name='node version')),
                ('figures', models.JSONField(default=dict, verbose_name='figures')),
                ('actor_name', models.CharField(blank=True, max_length=150, verbose_name='who')),
                ('actor', models.ForeignKey(null=True, on_delete=django.db.models.deletion.SET_NULL, related_name='+', to=settings.AUTH_USER_MODEL, verbose_name='who')),
                ('rollout', models.ForeignKey(on_delete=django.db.models.deletion.CASCADE, related_name='moves', to='scheduling.guardedrollout', verbose_name='guarded roll-out')),
            ],
            options={
                'verbose_name': 'move of a guarded roll-out',
                'verbose_name_plural': 'moves of guarded roll-outs',
                'ordering': ['id'],
            },
        ),
        migrations.CreateModel(
            name='AlertReceiver',
            fields=[
                ('id', models.BigAutoField(auto_created=True, primary_key=True, serialize=False, verbose_name='ID')),
                ('name', models.CharField(max_length=100, unique=True, verbose_name='name')),
                ('address', models.CharField(blank=True, max_length=254, verbose_name='mail address')),
                ('limits', models.JSONField(blank=True, default=dict, verbose_name='notified alerts')),
                ('holds_for', models.DurationField(default=datetime.timedelta(seconds=60), validators=[django.core.validators.MinValueValidator(datetime.timedelta(0))], verbose_name='notify after')),
                ('remind_every', models.DurationField(blank=True, default=datetime.timedelta(seconds=3600), null=True, verbose_name='repeat every')),
                ('enabled', models.BooleanField(default=True, verbose_name='enabled')),
                ('lease_no', models.IntegerField(default=0, editable=False)),
                ('watched_until', models.DateTimeField(editable=False, null=True)),
                ('tries', models.PositiveIntegerField(default=0, editable=False, verbose_name='tries')),
                ('retry_at', models.DateTimeField(editable=False, null=True, verbose_name='tried again at')),
                ('problem', models.CharField(blank=True, editable=False, max_length=500, verbose_name='problem')),
                ('told_at', models.DateTimeField(editable=False, null=True, verbose_name='last notified at')),
                ('channel', models.ForeignKey(on_delete=django.db.models.deletion.PROTECT, related_name='+', to='scheduling.channelconfig', verbose_name='channel')),
                ('community', models.ForeignKey(blank=True, null=True, on_delete=django.db.models.deletion.PROTECT, related_name='+', to='scheduling.community', verbose_name='community')),
            ],
            options={
                'verbose_name': 'alert receiver',
                'verbose_name_plural': 'alert receivers',
                'ordering': ['name'],
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
                ('first_value', models.FloatField(verbose_name='value at the start')),
                ('tried', models.BooleanField(default=False)),
                ('told_at', models.DateTimeField(null=True, verbose_name='notified at')),
                ('spoke_at', models.DateTimeField(null=True, verbose_name='last reminder at')),
                ('gone_at', models.DateTimeField(null=True, verbose_name='resolved at')),
                ('receiver', models.ForeignKey(on_delete=django.db.models.deletion.CASCADE, related_name='alerts', to='scheduling.alertreceiver')),
            ],
            options={
                'verbose_name': 'alert',
                'verbose_name_plural': 'alerts',
                'ordering': ['since', 'id'],
                'constraints': [models.UniqueConstraint(fields=('receiver', 'condition', 'subject'), name='one_alert_a_receiver_and_subject')],
            },
        ),
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
        *(
            migrations.RunSQL(f'ALTER TABLE {table} SET ({options})', migrations.RunSQL.noop)
            for table, options in STORAGE.items()
        ),
    ]
