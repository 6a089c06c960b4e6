"""Create the tables, and the storage options of busy tables."""

import datetime
import django.db.models.deletion
import django.db.models.fields.json
import django.utils.timezone
import rpa_tasks.models
import scheduling.ids
import scheduling.models.encrypted
import simple_history.models
import scheduling.errors
import scheduling.models.versioned
from django.conf import settings
from django.db import migrations, models

from scheduling.migrations.operations import CreateModels

# By default PostgreSQL vacuums a table after a fifth of it has changed.
UPDATED = (
    'autovacuum_vacuum_scale_factor = 0.02, autovacuum_vacuum_threshold = 1000, autovacuum_analyze_scale_factor = 0.02'
)
# Workers update a job several times and a lane with each job: free space in the page keeps the new version there.
STORAGE = {
    'rpa_tasks_job': f'fillfactor = 70, {UPDATED}',
    'rpa_tasks_run': UPDATED,
    'rpa_tasks_evidence': UPDATED,
    'rpa_tasks_lane': f'fillfactor = 50, {UPDATED}',
}

# Stored for outgoing webhooks with the change, whatever code makes it (see the migration of `scheduling`).
WEBHOOK_FACTS = """
CREATE FUNCTION rpa_tasks_note_job_end() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    IF scheduling_wants_webhook('job.ended') THEN
        INSERT INTO scheduling_webhookfact (type, object_key, at, data)
        SELECT 'job.ended', 'job:' || NEW.task_id, NEW.settled_at, jsonb_strip_nulls(jsonb_build_object(
            'task_id', NEW.task_id, 'delivery_key', NEW.root_id, 'state', NEW.state, 'reason', NEW.reason,
            'platform', p.key, 'shop_id', s.shop_id, 'task_type', f.task_type, 'attempt', NEW.attempt,
            'touch', NEW.touch_key))
        FROM rpa_tasks_shop AS s JOIN rpa_tasks_platform AS p ON p.id = s.platform_id
        JOIN rpa_tasks_flow AS f ON f.id = NEW.flow_id
        WHERE s.id = NEW.shop_id;
    END IF;
    RETURN NULL;
END $$;
CREATE FUNCTION rpa_tasks_note_shop() RETURNS trigger LANGUAGE plpgsql AS $$
DECLARE
    platform text := (SELECT key FROM rpa_tasks_platform WHERE id = NEW.platform_id);
    login text := CASE NEW.login_state WHEN 'needed' THEN 'shop.login_needed' ELSE 'shop.logged_in' END;
BEGIN
    IF NEW.login_state <> OLD.login_state AND scheduling_wants_webhook(login) THEN
        INSERT INTO scheduling_webhookfact (type, object_key, at, data)
        VALUES (login, format('shop:%s/%s', platform, NEW.shop_id), clock_timestamp(),
                jsonb_build_object('platform', platform, 'shop_id', NEW.shop_id));
    END IF;
    IF NEW.paused <> OLD.paused AND scheduling_wants_webhook('pause.changed') THEN
        INSERT INTO scheduling_webhookfact (type, object_key, at, data)
        VALUES ('pause.changed', format('pause:shop:%s/%s', platform, NEW.shop_id), clock_timestamp(),
                jsonb_build_object('scope', format('shop:%s/%s', platform, NEW.shop_id), 'paused', NEW.paused,
                                   'platform', platform, 'shop_id', NEW.shop_id));
    END IF;
    RETURN NULL;
END $$;
CREATE FUNCTION rpa_tasks_note_platform() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    IF scheduling_wants_webhook('pause.changed') THEN
        INSERT INTO scheduling_webhookfact (type, object_key, at, data)
        VALUES ('pause.changed', 'pause:platform:' || NEW.key, clock_timestamp(),
                jsonb_build_object('scope', 'platform:' || NEW.key, 'paused', NEW.paused, 'platform', NEW.key));
    END IF;
    RETURN NULL;
END $$;
CREATE TRIGGER webhook_ended AFTER UPDATE ON rpa_tasks_job FOR EACH ROW
WHEN (OLD.settled_at IS NULL AND NEW.settled_at IS NOT NULL) EXECUTE FUNCTION rpa_tasks_note_job_end();
CREATE TRIGGER webhook_shop AFTER UPDATE ON rpa_tasks_shop FOR EACH ROW
WHEN (OLD.login_state <> NEW.login_state OR OLD.paused <> NEW.paused) EXECUTE FUNCTION rpa_tasks_note_shop();
CREATE TRIGGER webhook_platform AFTER UPDATE ON rpa_tasks_platform FOR EACH ROW
WHEN (OLD.paused <> NEW.paused) EXECUTE FUNCTION rpa_tasks_note_platform();
"""
DROP_WEBHOOK_FACTS = """
DROP FUNCTION rpa_tasks_note_platform() CASCADE;
DROP FUNCTION rpa_tasks_note_shop() CASCADE;
DROP FUNCTION rpa_tasks_note_job_end() CASCADE;
"""


class Migration(migrations.Migration):

    initial = True

    dependencies = [
        migrations.swappable_dependency(settings.AUTH_USER_MODEL),
        ('scheduling', '0001_initial'),
    ]

    operations = [
        CreateModels([
            migrations.CreateModel(
                name='DemoOrder',
                fields=[
                    ('id', models.BigAutoField(auto_created=True, primary_key=True, serialize=False, verbose_name='ID')),
                    ('shop_id', models.CharField(max_length=64, verbose_name='shop id')),
                    ('order_no', models.CharField(max_length=64, verbose_name='order number')),
                    ('version', models.IntegerField(verbose_name='version')),
                    ('status', models.CharField(max_length=40, verbose_name='status')),
                    ('buyer', models.CharField(max_length=100, verbose_name='buyer')),
                    ('amount', models.DecimalField(decimal_places=2, max_digits=12, verbose_name='amount')),
                    ('writes', models.IntegerField(default=1, verbose_name='writes')),
                ],
                options={
                    'verbose_name': 'demo order',
                    'verbose_name_plural': 'demo orders',
                    'ordering': ['shop_id', 'order_no'],
                    'constraints': [models.UniqueConstraint(fields=('shop_id', 'order_no'), name='one_demo_order_a_number')],
                },
            ),
            migrations.CreateModel(
                name='DemoWatermark',
                fields=[
                    ('shop_id', models.CharField(max_length=64, primary_key=True, serialize=False, verbose_name='shop id')),
                    ('position', models.BigIntegerField(default=0, verbose_name='position')),
                    ('lease_no', models.IntegerField(default=0, verbose_name='lease number')),
                ],
                options={
                    'verbose_name': 'demo watermark',
                    'verbose_name_plural': 'demo watermarks',
                },
            ),
            migrations.CreateModel(
                name='HistoricalPlatform',
                fields=[
                    ('id', models.BigIntegerField(auto_created=True, blank=True, db_index=True, verbose_name='ID')),
                    ('version', models.PositiveIntegerField(default=1, editable=False, verbose_name='version')),
                    ('browser', models.JSONField(blank=True, db_default={}, default=dict, verbose_name='browser')),
                    ('key', models.CharField(db_index=True, max_length=64, validators=[scheduling.models.versioned.Bound(scheduling.errors.check_key)], verbose_name='key')),
                    ('name', models.CharField(blank=True, max_length=100, verbose_name='name')),
                    ('dedicated_queue', models.BooleanField(default=False, verbose_name='queues of its own')),
                    ('paused', models.BooleanField(default=False, verbose_name='paused')),
                    ('backlog_limit', models.PositiveIntegerField(default=10000, validators=[scheduling.models.versioned.Bound(scheduling.errors.check_number, least=1, most=1000000)], verbose_name='most jobs waiting')),
                    ('breaker_threshold', models.PositiveSmallIntegerField(default=3, validators=[scheduling.models.versioned.Bound(scheduling.errors.check_number, least=1, most=100)], verbose_name='errors that open the breaker')),
                    ('waits_for_home', models.BooleanField(db_default=True, default=True, verbose_name='wait for the preferred node')),
                    ('check_task_type', models.CharField(blank=True, db_default='', max_length=64, verbose_name='login check')),
                    ('retired_at', models.DateTimeField(blank=True, editable=False, null=True, verbose_name='retired at')),
                    ('history_id', models.AutoField(primary_key=True, serialize=False)),
                    ('history_date', models.DateTimeField(db_index=True)),
                    ('history_change_reason', models.CharField(max_length=100, null=True)),
                    ('history_type', models.CharField(choices=[('+', 'Created'), ('~', 'Changed'), ('-', 'Deleted')], max_length=1)),
                    ('history_user', models.ForeignKey(null=True, on_delete=django.db.models.deletion.SET_NULL, related_name='+', to=settings.AUTH_USER_MODEL)),
                ],
                options={
                    'verbose_name': 'historical platform',
                    'verbose_name_plural': 'historical platforms',
                    'ordering': ('-history_date', '-history_id'),
                    'get_latest_by': ('history_date', 'history_id'),
                },
                bases=(simple_history.models.HistoricalChanges, models.Model),
            ),
            migrations.CreateModel(
                name='Platform',
                fields=[
                    ('id', models.BigAutoField(auto_created=True, primary_key=True, serialize=False, verbose_name='ID')),
                    ('version', models.PositiveIntegerField(default=1, editable=False, verbose_name='version')),
                    ('browser', models.JSONField(blank=True, db_default={}, default=dict, verbose_name='browser')),
                    ('proxy_secret', scheduling.models.encrypted.NodeSecretField(blank=True, default=dict, verbose_name='password of the proxy')),
                    ('key', models.CharField(max_length=64, unique=True, validators=[scheduling.models.versioned.Bound(scheduling.errors.check_key)], verbose_name='key')),
                    ('name', models.CharField(blank=True, max_length=100, verbose_name='name')),
                    ('dedicated_queue', models.BooleanField(default=False, verbose_name='queues of its own')),
                    ('paused', models.BooleanField(default=False, verbose_name='paused')),
                    ('backlog_limit', models.PositiveIntegerField(default=10000, validators=[scheduling.models.versioned.Bound(scheduling.errors.check_number, least=1, most=1000000)], verbose_name='most jobs waiting')),
                    ('breaker_threshold', models.PositiveSmallIntegerField(default=3, validators=[scheduling.models.versioned.Bound(scheduling.errors.check_number, least=1, most=100)], verbose_name='errors that open the breaker')),
                    ('waits_for_home', models.BooleanField(db_default=True, default=True, verbose_name='wait for the preferred node')),
                    ('check_task_type', models.CharField(blank=True, db_default='', max_length=64, verbose_name='login check')),
                    ('retired_at', models.DateTimeField(blank=True, editable=False, null=True, verbose_name='retired at')),
                ],
                options={
                    'verbose_name': 'platform',
                    'verbose_name_plural': 'platforms',
                    'ordering': ['key'],
                },
            ),
            migrations.CreateModel(
                name='Breaker',
                fields=[
                    ('platform', models.OneToOneField(on_delete=django.db.models.deletion.CASCADE, primary_key=True, serialize=False, to='rpa_tasks.platform', verbose_name='platform')),
                    ('errors', models.PositiveIntegerField(default=0, verbose_name='errors in a row')),
                    ('open_until', models.DateTimeField(blank=True, null=True, verbose_name='open until')),
                    ('opened_at', models.DateTimeField(blank=True, null=True, verbose_name='opened at')),
                    ('openings', models.PositiveSmallIntegerField(default=0, verbose_name='openings')),
                    ('probe', models.UUIDField(blank=True, null=True, verbose_name='probing job')),
                ],
                options={
                    'verbose_name': 'circuit breaker',
                    'verbose_name_plural': 'circuit breakers',
                },
            ),
            migrations.CreateModel(
                name='HistoricalFlow',
                fields=[
                    ('id', models.BigIntegerField(auto_created=True, blank=True, db_index=True, verbose_name='ID')),
                    ('version', models.PositiveIntegerField(default=1, editable=False, verbose_name='version')),
                    ('task_type', models.CharField(max_length=64, validators=[scheduling.models.versioned.Bound(scheduling.errors.check_key)], verbose_name='task type')),
                    ('command', models.JSONField(default=list, verbose_name='command')),
                    ('param_style', models.CharField(choices=[('flat', 'its members at the top level'), ('nested', 'in the member “payload”')], db_default='flat', default='flat', max_length=10, verbose_name='payload in the parameter')),
                    ('timeout', models.DurationField(default=datetime.timedelta(seconds=600), validators=[scheduling.models.versioned.Bound(scheduling.errors.check_span, least=datetime.timedelta(seconds=1), most=datetime.timedelta(days=1))], verbose_name='timeout')),
                    ('needs_browser', models.BooleanField(default=True, verbose_name='needs a browser')),
                    ('idempotent', models.BooleanField(default=False, verbose_name='idempotent')),
                    ('exit_codes', models.JSONField(blank=True, default=dict, verbose_name='exit codes')),
                    ('payload_schema', models.JSONField(blank=True, default=dict, verbose_name='schema of the payload')),
                    ('needs_result', models.BooleanField(default=False, verbose_name='must print a result')),
                    ('retry_delays', models.JSONField(blank=True, default=rpa_tasks.models.usual_retry_delays, validators=[scheduling.models.versioned.Bound(scheduling.errors.check_retry_delays)], verbose_name='retry delays')),
                    ('dedupe_by', models.CharField(choices=[('payload', 'same payload'), ('task_type', 'same task type, whatever the payload'), ('none', 'never')], db_default='payload', default='payload', max_length=10, verbose_name='merge waiting jobs of')),
                    ('dedupe_window', models.DurationField(blank=True, null=True, validators=[scheduling.models.versioned.Bound(scheduling.errors.check_span, least=datetime.timedelta(seconds=1), most=datetime.timedelta(days=31))], verbose_name='runs once within')),
                    ('dedupe_period', models.CharField(blank=True, choices=[('hour', 'hour'), ('day', 'calendar day'), ('week', 'week from Monday'), ('month', 'calendar month')], db_default='', default='', max_length=5, verbose_name='runs once a')),
                    ('dedupe_timezone', models.CharField(blank=True, db_default='', default='', max_length=64, verbose_name='time zone')),
                    ('dedupe_rerun', models.CharField(choices=[('refuse', 'never'), ('after_failure', 'after a failure'), ('always', 'after any end')], db_default='after_failure', default='after_failure', max_length=15, verbose_name='run again within that time')),
                    ('clear_cookies', models.BooleanField(default=False, verbose_name='clear cookies first')),
                    ('environment', models.JSONField(blank=True, default=list, validators=[scheduling.models.versioned.Bound(scheduling.errors.check_texts, longest=100)], verbose_name='environment variables')),
                    ('path', models.JSONField(blank=True, db_default=[], default=list, validators=[scheduling.models.versioned.Bound(scheduling.errors.check_texts, longest=1000)], verbose_name='program folders')),
                    ('env', models.JSONField(blank=True, db_default={}, default=dict, verbose_name='fixed variables')),
                    ('cwd', models.CharField(blank=True, db_default='', max_length=1000, verbose_name='working directory')),
                    ('retired_at', models.DateTimeField(blank=True, editable=False, null=True, verbose_name='retired at')),
                    ('platform', models.ForeignKey(blank=True, db_constraint=False, null=True, on_delete=django.db.models.deletion.DO_NOTHING, related_name='+', to='rpa_tasks.platform', verbose_name='platform')),
                    ('history_id', models.AutoField(primary_key=True, serialize=False)),
                    ('history_date', models.DateTimeField(db_index=True)),
                    ('history_change_reason', models.CharField(max_length=100, null=True)),
                    ('history_type', models.CharField(choices=[('+', 'Created'), ('~', 'Changed'), ('-', 'Deleted')], max_length=1)),
                    ('history_user', models.ForeignKey(null=True, on_delete=django.db.models.deletion.SET_NULL, related_name='+', to=settings.AUTH_USER_MODEL)),
                ],
                options={
                    'verbose_name': 'historical flow',
                    'verbose_name_plural': 'historical flows',
                    'ordering': ('-history_date', '-history_id'),
                    'get_latest_by': ('history_date', 'history_id'),
                },
                bases=(simple_history.models.HistoricalChanges, models.Model),
            ),
            migrations.CreateModel(
                name='Flow',
                fields=[
                    ('id', models.BigAutoField(auto_created=True, primary_key=True, serialize=False, verbose_name='ID')),
                    ('version', models.PositiveIntegerField(default=1, editable=False, verbose_name='version')),
                    ('platform', models.ForeignKey(on_delete=django.db.models.deletion.PROTECT, related_name='flows', to='rpa_tasks.platform', verbose_name='platform')),
                    ('task_type', models.CharField(max_length=64, validators=[scheduling.models.versioned.Bound(scheduling.errors.check_key)], verbose_name='task type')),
                    ('command', models.JSONField(default=list, verbose_name='command')),
                    ('param_style', models.CharField(choices=[('flat', 'its members at the top level'), ('nested', 'in the member “payload”')], db_default='flat', default='flat', max_length=10, verbose_name='payload in the parameter')),
                    ('timeout', models.DurationField(default=datetime.timedelta(seconds=600), validators=[scheduling.models.versioned.Bound(scheduling.errors.check_span, least=datetime.timedelta(seconds=1), most=datetime.timedelta(days=1))], verbose_name='timeout')),
                    ('needs_browser', models.BooleanField(default=True, verbose_name='needs a browser')),
                    ('idempotent', models.BooleanField(default=False, verbose_name='idempotent')),
                    ('exit_codes', models.JSONField(blank=True, default=dict, verbose_name='exit codes')),
                    ('payload_schema', models.JSONField(blank=True, default=dict, verbose_name='schema of the payload')),
                    ('needs_result', models.BooleanField(default=False, verbose_name='must print a result')),
                    ('retry_delays', models.JSONField(blank=True, default=rpa_tasks.models.usual_retry_delays, validators=[scheduling.models.versioned.Bound(scheduling.errors.check_retry_delays)], verbose_name='retry delays')),
                    ('dedupe_by', models.CharField(choices=[('payload', 'same payload'), ('task_type', 'same task type, whatever the payload'), ('none', 'never')], db_default='payload', default='payload', max_length=10, verbose_name='merge waiting jobs of')),
                    ('dedupe_window', models.DurationField(blank=True, null=True, validators=[scheduling.models.versioned.Bound(scheduling.errors.check_span, least=datetime.timedelta(seconds=1), most=datetime.timedelta(days=31))], verbose_name='runs once within')),
                    ('dedupe_period', models.CharField(blank=True, choices=[('hour', 'hour'), ('day', 'calendar day'), ('week', 'week from Monday'), ('month', 'calendar month')], db_default='', default='', max_length=5, verbose_name='runs once a')),
                    ('dedupe_timezone', models.CharField(blank=True, db_default='', default='', max_length=64, verbose_name='time zone')),
                    ('dedupe_rerun', models.CharField(choices=[('refuse', 'never'), ('after_failure', 'after a failure'), ('always', 'after any end')], db_default='after_failure', default='after_failure', max_length=15, verbose_name='run again within that time')),
                    ('clear_cookies', models.BooleanField(default=False, verbose_name='clear cookies first')),
                    ('environment', models.JSONField(blank=True, default=list, validators=[scheduling.models.versioned.Bound(scheduling.errors.check_texts, longest=100)], verbose_name='environment variables')),
                    ('path', models.JSONField(blank=True, db_default=[], default=list, validators=[scheduling.models.versioned.Bound(scheduling.errors.check_texts, longest=1000)], verbose_name='program folders')),
                    ('env', models.JSONField(blank=True, db_default={}, default=dict, verbose_name='fixed variables')),
                    ('cwd', models.CharField(blank=True, db_default='', max_length=1000, verbose_name='working directory')),
                    ('retired_at', models.DateTimeField(blank=True, editable=False, null=True, verbose_name='retired at')),
                ],
                options={
                    'verbose_name': 'flow',
                    'verbose_name_plural': 'flows',
                    'ordering': ['platform', 'task_type'],
                    'permissions': [('define_command', 'Can define commands of flows')],
                    'constraints': [models.UniqueConstraint(fields=('platform', 'task_type'), name='one_flow_a_task_type')],
                },
            ),
            migrations.CreateModel(
                name='HistoricalShop',
                fields=[
                    ('id', models.BigIntegerField(auto_created=True, blank=True, db_index=True, verbose_name='ID')),
                    ('version', models.PositiveIntegerField(default=1, editable=False, verbose_name='version')),
                    ('browser', models.JSONField(blank=True, db_default={}, default=dict, verbose_name='browser')),
                    ('shop_id', models.CharField(max_length=64, verbose_name='shop id')),
                    ('name', models.CharField(blank=True, max_length=200, verbose_name='name')),
                    ('dedicated_queue', models.BooleanField(default=False, verbose_name='a queue of its own')),
                    ('paused', models.BooleanField(default=False, verbose_name='paused')),
                    ('login_state', models.CharField(choices=[('ok', 'Logged in'), ('needed', 'Login needed')], default='ok', max_length=10, verbose_name='login')),
                    ('profile_id', models.CharField(blank=True, max_length=140, verbose_name='browser profile')),
                    ('backlog_limit', models.PositiveIntegerField(default=100, validators=[scheduling.models.versioned.Bound(scheduling.errors.check_number, least=1, most=1000000)], verbose_name='most jobs waiting')),
                    ('retired_at', models.DateTimeField(blank=True, editable=False, null=True, verbose_name='retired at')),
                    ('platform', models.ForeignKey(blank=True, db_constraint=False, null=True, on_delete=django.db.models.deletion.DO_NOTHING, related_name='+', to='rpa_tasks.platform', verbose_name='platform')),
                    ('history_id', models.AutoField(primary_key=True, serialize=False)),
                    ('history_date', models.DateTimeField(db_index=True)),
                    ('history_change_reason', models.CharField(max_length=100, null=True)),
                    ('history_type', models.CharField(choices=[('+', 'Created'), ('~', 'Changed'), ('-', 'Deleted')], max_length=1)),
                    ('history_user', models.ForeignKey(null=True, on_delete=django.db.models.deletion.SET_NULL, related_name='+', to=settings.AUTH_USER_MODEL)),
                ],
                options={
                    'verbose_name': 'historical shop',
                    'verbose_name_plural': 'historical shops',
                    'ordering': ('-history_date', '-history_id'),
                    'get_latest_by': ('history_date', 'history_id'),
                },
                bases=(simple_history.models.HistoricalChanges, models.Model),
            ),
            migrations.CreateModel(
                name='Shop',
                fields=[
                    ('id', models.BigAutoField(auto_created=True, primary_key=True, serialize=False, verbose_name='ID')),
                    ('version', models.PositiveIntegerField(default=1, editable=False, verbose_name='version')),
                    ('browser', models.JSONField(blank=True, db_default={}, default=dict, verbose_name='browser')),
                    ('proxy_secret', scheduling.models.encrypted.NodeSecretField(blank=True, default=dict, verbose_name='password of the proxy')),
                    ('platform', models.ForeignKey(on_delete=django.db.models.deletion.PROTECT, related_name='shops', to='rpa_tasks.platform', verbose_name='platform')),
                    ('shop_id', models.CharField(max_length=64, verbose_name='shop id')),
                    ('name', models.CharField(blank=True, max_length=200, verbose_name='name')),
                    ('dedicated_queue', models.BooleanField(default=False, verbose_name='a queue of its own')),
                    ('paused', models.BooleanField(default=False, verbose_name='paused')),
                    ('login_state', models.CharField(choices=[('ok', 'Logged in'), ('needed', 'Login needed')], default='ok', max_length=10, verbose_name='login')),
                    ('login_lost_at', models.DateTimeField(blank=True, editable=False, null=True, verbose_name='login lost at')),
                    ('profile_id', models.CharField(blank=True, max_length=140, verbose_name='browser profile')),
                    ('backlog_limit', models.PositiveIntegerField(default=100, validators=[scheduling.models.versioned.Bound(scheduling.errors.check_number, least=1, most=1000000)], verbose_name='most jobs waiting')),
                    ('retired_at', models.DateTimeField(blank=True, editable=False, null=True, verbose_name='retired at')),
                ],
                options={
                    'verbose_name': 'shop',
                    'verbose_name_plural': 'shops',
                    'ordering': ['platform', 'shop_id'],
                    'permissions': [('take_over_shop', 'Can take over browsers of shops')],
                    'constraints': [models.UniqueConstraint(fields=('platform', 'shop_id'), name='one_shop_an_id'), models.UniqueConstraint(condition=models.Q(('profile_id', ''), _negated=True), fields=('profile_id',), name='one_shop_a_profile'), models.UniqueConstraint(django.db.models.fields.json.KeyTextTransform('cdp_url', 'browser'), condition=models.Q(('browser__cdp_url', 'own'), _negated=True), name='one_shop_a_browser')],
                },
            ),
            migrations.CreateModel(
                name='Lane',
                fields=[
                    ('shop', models.OneToOneField(on_delete=django.db.models.deletion.CASCADE, primary_key=True, serialize=False, to='rpa_tasks.shop', verbose_name='shop')),
                    ('task_id', models.UUIDField(null=True, verbose_name='running job')),
                    ('lease_no', models.IntegerField(default=0, verbose_name='lease number')),
                    ('home', models.CharField(blank=True, max_length=100, verbose_name='node of the profile')),
                    ('held_until', models.DateTimeField(null=True, verbose_name='held until')),
                    ('check_id', models.UUIDField(null=True, verbose_name='login check')),
                    ('check_reason', models.CharField(blank=True, db_default='', max_length=64, verbose_name='result of the login check')),
                    ('last_served_at', models.DateTimeField(null=True, verbose_name='last served at')),
                    ('last_success_at', models.DateTimeField(null=True, verbose_name='last success at')),
                ],
                options={
                    'verbose_name': 'lane',
                    'verbose_name_plural': 'lanes',
                },
            ),
            migrations.CreateModel(
                name='Job',
                fields=[
                    ('task_id', models.UUIDField(default=scheduling.ids.new_id, editable=False, primary_key=True, serialize=False, verbose_name='task id')),
                    ('root_id', models.UUIDField(default=scheduling.ids.new_id, editable=False, verbose_name='delivery key')),
                    ('retry_of', models.UUIDField(editable=False, null=True, verbose_name='retry of')),
                    ('priority', models.SmallIntegerField(choices=[(0, 'High'), (1, 'Normal'), (2, 'Low')], default=1, verbose_name='priority')),
                    ('due_at', models.DateTimeField(verbose_name='due at')),
                    ('planned_at', models.DateTimeField(verbose_name='planned at')),
                    ('attempt', models.SmallIntegerField(default=0, verbose_name='attempts')),
                    ('lease_no', models.IntegerField(default=0, verbose_name='lease number')),
                    ('lease_until', models.DateTimeField(null=True, verbose_name='lease until')),
                    ('sending_at', models.DateTimeField(null=True, verbose_name='sending at')),
                    ('settled_at', models.DateTimeField(null=True, verbose_name='settled at')),
                    ('reason', models.CharField(blank=True, default='', max_length=64, verbose_name='reason')),
                    ('created_at', models.DateTimeField(default=django.utils.timezone.now, editable=False, verbose_name='created at')),
                    ('state', models.CharField(choices=[('scheduled', 'Scheduled'), ('queued', 'Dispatched'), ('running', 'Running'), ('succeeded', 'Succeeded'), ('cancelled', 'Cancelled'), ('failed', 'Failed'), ('unknown', 'Unknown')], default='scheduled', editable=False, max_length=10, verbose_name='state')),
                    ('shop', models.ForeignKey(on_delete=django.db.models.deletion.PROTECT, related_name='jobs', to='rpa_tasks.shop', verbose_name='shop')),
                    ('flow', models.ForeignKey(db_index=False, on_delete=django.db.models.deletion.PROTECT, related_name='jobs', to='rpa_tasks.flow', verbose_name='flow')),
                    ('payload', models.JSONField(blank=True, default=dict, verbose_name='payload')),
                    ('dedupe_key', models.CharField(blank=True, max_length=200, verbose_name='dedupe key')),
                    ('fresh', models.BooleanField(default=True)),
                    ('requests', models.PositiveIntegerField(default=1, verbose_name='requests')),
                    ('failures', models.PositiveSmallIntegerField(default=0, verbose_name='failures')),
                    ('touch_key', models.UUIDField(null=True, unique=True, verbose_name='touch')),
                    ('deadline', models.DateTimeField(null=True, verbose_name='to be done by')),
                    ('source', models.CharField(blank=True, max_length=100, verbose_name='published by')),
                    ('node', models.CharField(blank=True, max_length=100, verbose_name='node')),
                    ('progress', models.FloatField(null=True, verbose_name='progress')),
                    ('progress_message', models.CharField(blank=True, max_length=200, verbose_name='progress message')),
                    ('result', models.JSONField(null=True, verbose_name='result')),
                    ('cancel_requested_at', models.DateTimeField(null=True, verbose_name='cancel requested at')),
                ],
                options={
                    'verbose_name': 'RPA job',
                    'verbose_name_plural': 'RPA jobs',
                    'ordering': ['-created_at'],
                    'permissions': [('run_job', 'Can publish jobs'), ('cancel_job', 'Can cancel jobs')],
                    'indexes': [models.Index(condition=models.Q(('state__in', ('running',))), fields=['lease_until'], name='rpa_job_leased'), models.Index(condition=models.Q(('state__in', ('failed', 'unknown', 'cancelled'))), fields=['task_id', 'state'], name='rpa_job_rare'), models.Index(condition=models.Q(('state__in', ('scheduled', 'queued'))), fields=['state', 'due_at'], name='rpa_job_due'), models.Index(condition=models.Q(('state__in', ('scheduled', 'queued'))), fields=['shop', 'priority', 'due_at'], name='rpa_job_heads'), models.Index(condition=models.Q(('state__in', ('scheduled', 'queued'))), fields=['flow', 'shop', 'dedupe_key'], name='rpa_job_keys'), models.Index(condition=models.Q(('deadline__isnull', False), ('state__in', ('scheduled', 'queued', 'running'))), fields=['deadline'], name='rpa_job_deadline'), models.Index(fields=['-created_at'], name='rpa_job_latest')],
                    'constraints': [models.CheckConstraint(condition=models.Q(models.Q(('state__in', ('running',)), ('lease_until__isnull', False)), models.Q(models.Q(('state__in', ('running',)), _negated=True), ('lease_until__isnull', True)), _connector='OR'), name='rpa_job_leased_iff_lease'), models.UniqueConstraint(condition=models.Q(('state', 'running')), fields=('shop',), name='rpa_one_run_a_shop'), models.UniqueConstraint(condition=models.Q(('fresh', True), ('state__in', ('scheduled', 'queued'))), fields=('shop', 'flow', 'dedupe_key'), name='rpa_one_waits'), models.UniqueConstraint(condition=models.Q(('retry_of__isnull', False)), fields=('retry_of',), name='rpa_retried_once')],
                },
            ),
            migrations.CreateModel(
                name='DedupeWindow',
                fields=[
                    ('task_id', models.UUIDField(editable=False, primary_key=True, serialize=False)),
                    ('shop', models.ForeignKey(db_index=False, on_delete=django.db.models.deletion.CASCADE, related_name='+', to='rpa_tasks.shop')),
                    ('flow', models.ForeignKey(db_index=False, on_delete=django.db.models.deletion.CASCADE, related_name='+', to='rpa_tasks.flow')),
                    ('key', models.CharField(max_length=200)),
                    ('ends_at', models.DateTimeField()),
                ],
                options={
                    'default_permissions': (),
                    'constraints': [models.UniqueConstraint(fields=('shop', 'flow', 'key'), name='rpa_one_window_a_key')],
                },
            ),
            migrations.CreateModel(
                name='Run',
                fields=[
                    ('id', models.BigAutoField(auto_created=True, primary_key=True, serialize=False, verbose_name='ID')),
                    ('job', models.ForeignKey(on_delete=django.db.models.deletion.CASCADE, related_name='runs', to='rpa_tasks.job', verbose_name='job')),
                    ('number', models.IntegerField(verbose_name='number')),
                    ('lease_no', models.IntegerField(verbose_name='lease number')),
                    ('node', models.CharField(blank=True, max_length=100, verbose_name='node')),
                    ('started_at', models.DateTimeField(verbose_name='started at')),
                    ('ended_at', models.DateTimeField(null=True, verbose_name='ended at')),
                    ('pool_wait', models.DurationField(null=True, verbose_name='wait for a browser')),
                    ('warm', models.BooleanField(null=True, verbose_name='warm browser')),
                    ('outcome', models.CharField(choices=[('succeeded', 'Succeeded'), ('transient', 'Failed, may succeed later'), ('business', 'Failed for good'), ('session', 'Login needed'), ('platform', 'Blocked by the platform'), ('held', 'Did not start'), ('cancelled', 'Cancelled'), ('unknown', 'Unknown')], max_length=10, verbose_name='outcome')),
                    ('reason', models.CharField(blank=True, max_length=64, verbose_name='reason')),
                    ('exit_code', models.IntegerField(null=True, verbose_name='exit code')),
                    ('detail', models.TextField(blank=True, verbose_name='detail')),
                ],
                options={
                    'verbose_name': 'run',
                    'verbose_name_plural': 'runs',
                    'ordering': ['id'],
                    'indexes': [models.Index(condition=models.Q(('outcome', 'held'), _negated=True), fields=['ended_at'], name='rpa_run_ended')],
                },
            ),
            migrations.CreateModel(
                name='Evidence',
                fields=[
                    ('id', models.BigAutoField(auto_created=True, primary_key=True, serialize=False, verbose_name='ID')),
                    ('run', models.ForeignKey(on_delete=django.db.models.deletion.CASCADE, related_name='evidence', to='rpa_tasks.run', verbose_name='run')),
                    ('kind', models.CharField(choices=[('screenshot', 'Screenshot'), ('html', 'Page HTML'), ('log', 'Log')], max_length=10, verbose_name='kind')),
                    ('content', models.BinaryField(verbose_name='content')),
                    ('created_at', models.DateTimeField(db_index=True, default=django.utils.timezone.now, editable=False, verbose_name='created at')),
                ],
                options={
                    'verbose_name': 'evidence',
                    'verbose_name_plural': 'evidence',
                    'constraints': [models.UniqueConstraint(fields=('run', 'kind'), name='one_evidence_a_kind')],
                },
            ),
            migrations.CreateModel(
                name='ExecutionNode',
                fields=[
                    ('name', models.CharField(max_length=100, primary_key=True, serialize=False, verbose_name='name')),
                    ('state_id', models.CharField(blank=True, db_default='', editable=False, max_length=36)),
                    ('seen_at', models.DateTimeField(verbose_name='seen at')),
                    ('started_at', models.DateTimeField(verbose_name='started at')),
                    ('slots', models.PositiveSmallIntegerField(verbose_name='slots')),
                    ('queues', models.JSONField(default=list, verbose_name='queues')),
                    ('browsers', models.JSONField(default=list, verbose_name='browsers')),
                    ('draining_at', models.DateTimeField(editable=False, null=True, verbose_name='drained since')),
                    ('drained_by', models.CharField(blank=True, db_default='', editable=False, max_length=150, verbose_name='drained by')),
                ],
                options={
                    'verbose_name': 'execution node',
                    'verbose_name_plural': 'execution nodes',
                    'ordering': ['name'],
                },
            ),
            migrations.CreateModel(
                name='TakeOver',
                fields=[
                    ('id', models.BigAutoField(auto_created=True, primary_key=True, serialize=False, verbose_name='ID')),
                    ('shop', models.ForeignKey(on_delete=django.db.models.deletion.PROTECT, related_name='take_overs', to='rpa_tasks.shop', verbose_name='shop')),
                    ('task_id', models.UUIDField(null=True, verbose_name='shared run')),
                    ('lease_no', models.IntegerField(verbose_name='lease number')),
                    ('user', models.ForeignKey(null=True, on_delete=django.db.models.deletion.SET_NULL, related_name='+', to=settings.AUTH_USER_MODEL, verbose_name='user')),
                    ('username', models.CharField(max_length=150, verbose_name='taken over by')),
                    ('address', models.GenericIPAddressField(null=True, verbose_name='address')),
                    ('node', models.CharField(max_length=100, verbose_name='node')),
                    ('key', models.BinaryField(null=True)),
                    ('started_at', models.DateTimeField(default=django.utils.timezone.now, verbose_name='started at')),
                    ('lease_until', models.DateTimeField()),
                    ('wanted_end', models.CharField(blank=True, choices=[('ended', 'Ended by the operator'), ('continued', 'Logged in, the jobs continue'), ('idle', 'No input for too long'), ('disconnected', "The operator's connection was lost"), ('run_ended', 'The run ended'), ('no_browser', 'No browser was available'), ('browser_lost', 'The browser ended'), ('node_stopping', 'The node was stopping'), ('node_lost', 'The node did not answer')], max_length=15)),
                    ('ended_at', models.DateTimeField(null=True, verbose_name='ended at')),
                    ('end', models.CharField(blank=True, choices=[('ended', 'Ended by the operator'), ('continued', 'Logged in, the jobs continue'), ('idle', 'No input for too long'), ('disconnected', "The operator's connection was lost"), ('run_ended', 'The run ended'), ('no_browser', 'No browser was available'), ('browser_lost', 'The browser ended'), ('node_stopping', 'The node was stopping'), ('node_lost', 'The node did not answer')], max_length=15, verbose_name='why it ended')),
                ],
                options={
                    'verbose_name': 'take-over',
                    'verbose_name_plural': 'take-overs',
                    'ordering': ['-pk'],
                    'constraints': [models.UniqueConstraint(condition=models.Q(('ended_at', None)), fields=('shop',), name='rpa_one_takeover')],
                },
            ),
        ]),
        migrations.RunSQL(WEBHOOK_FACTS, DROP_WEBHOOK_FACTS),
        *(
            migrations.RunSQL(f'ALTER TABLE {table} SET ({options})', migrations.RunSQL.noop)
            for table, options in STORAGE.items()
        ),
    ]
