"""Create the tables and the default policy: a minute, and up to five seconds more."""

import datetime
import django.db.models.deletion
import simple_history.models
import scheduling.errors
import scheduling.models.versioned
from django.conf import settings
from django.db import migrations, models

from scheduling.migrations.operations import CreateModels


def add_default_policy(apps, schema_editor):
    apps.get_model('chat_sessions', 'SilencePolicy').objects.get_or_create(
        key='default', defaults={'threshold': datetime.timedelta(seconds=60), 'jitter': datetime.timedelta(seconds=5)}
    )


class Migration(migrations.Migration):

    initial = True

    dependencies = [
        migrations.swappable_dependency(settings.AUTH_USER_MODEL),
    ]

    operations = [
        CreateModels([
            migrations.CreateModel(
                name='HistoricalSilencePolicy',
                fields=[
                    ('id', models.BigIntegerField(auto_created=True, blank=True, db_index=True, verbose_name='ID')),
                    ('version', models.PositiveIntegerField(default=1, editable=False, verbose_name='version')),
                    ('key', models.CharField(db_index=True, max_length=64, validators=[scheduling.models.versioned.Bound(scheduling.errors.check_key)], verbose_name='key')),
                    ('tags', models.JSONField(blank=True, default=list, validators=[scheduling.models.versioned.Bound(scheduling.errors.check_texts, longest=64)], verbose_name='tags')),
                    ('after', models.CharField(choices=[('any', 'any message'), ('agent', 'a message of an agent, until the customer writes'), ('customer', 'a message of the customer, until an agent answers')], default='any', max_length=8, verbose_name='timer runs after')),
                    ('threshold', models.DurationField(default=datetime.timedelta(seconds=60), validators=[scheduling.models.versioned.Bound(scheduling.errors.check_span, least=datetime.timedelta(seconds=2), most=datetime.timedelta(seconds=43200))], verbose_name='silent after')),
                    ('hours', models.JSONField(blank=True, default=list, verbose_name='opening hours')),
                    ('jitter', models.DurationField(default=datetime.timedelta(0), validators=[scheduling.models.versioned.Bound(scheduling.errors.check_span, most=datetime.timedelta(seconds=3600))], verbose_name='random delay (jitter)')),
                    ('grace', models.DurationField(default=datetime.timedelta(0), validators=[scheduling.models.versioned.Bound(scheduling.errors.check_span, most=datetime.timedelta(seconds=600))], verbose_name='longer at the end')),
                    ('grace_for', models.CharField(choices=[('all', 'every chat'), ('typing', 'customers who typed and have not sent')], default='all', max_length=8, verbose_name='longer for')),
                    ('max_nudges', models.PositiveSmallIntegerField(default=1, validators=[scheduling.models.versioned.Bound(scheduling.errors.check_number, least=1, most=10)], verbose_name='most messages')),
                    ('growth', models.FloatField(default=2.0, validators=[scheduling.models.versioned.Bound(scheduling.errors.check_number, least=1, most=10)], verbose_name='growth of the gaps')),
                    ('retired_at', models.DateTimeField(blank=True, editable=False, null=True, verbose_name='retired at')),
                    ('history_id', models.AutoField(primary_key=True, serialize=False)),
                    ('history_date', models.DateTimeField(db_index=True)),
                    ('history_change_reason', models.CharField(max_length=100, null=True)),
                    ('history_type', models.CharField(choices=[('+', 'Created'), ('~', 'Changed'), ('-', 'Deleted')], max_length=1)),
                    ('history_user', models.ForeignKey(null=True, on_delete=django.db.models.deletion.SET_NULL, related_name='+', to=settings.AUTH_USER_MODEL)),
                ],
                options={
                    'verbose_name': 'historical silence policy',
                    'verbose_name_plural': 'historical silence policies',
                    'ordering': ('-history_date', '-history_id'),
                    'get_latest_by': ('history_date', 'history_id'),
                },
                bases=(simple_history.models.HistoricalChanges, models.Model),
            ),
            migrations.CreateModel(
                name='SilencePolicy',
                fields=[
                    ('id', models.BigAutoField(auto_created=True, primary_key=True, serialize=False, verbose_name='ID')),
                    ('version', models.PositiveIntegerField(default=1, editable=False, verbose_name='version')),
                    ('key', models.CharField(max_length=64, unique=True, validators=[scheduling.models.versioned.Bound(scheduling.errors.check_key)], verbose_name='key')),
                    ('tags', models.JSONField(blank=True, default=list, validators=[scheduling.models.versioned.Bound(scheduling.errors.check_texts, longest=64)], verbose_name='tags')),
                    ('after', models.CharField(choices=[('any', 'any message'), ('agent', 'a message of an agent, until the customer writes'), ('customer', 'a message of the customer, until an agent answers')], default='any', max_length=8, verbose_name='timer runs after')),
                    ('threshold', models.DurationField(default=datetime.timedelta(seconds=60), validators=[scheduling.models.versioned.Bound(scheduling.errors.check_span, least=datetime.timedelta(seconds=2), most=datetime.timedelta(seconds=43200))], verbose_name='silent after')),
                    ('hours', models.JSONField(blank=True, default=list, verbose_name='opening hours')),
                    ('jitter', models.DurationField(default=datetime.timedelta(0), validators=[scheduling.models.versioned.Bound(scheduling.errors.check_span, most=datetime.timedelta(seconds=3600))], verbose_name='random delay (jitter)')),
                    ('grace', models.DurationField(default=datetime.timedelta(0), validators=[scheduling.models.versioned.Bound(scheduling.errors.check_span, most=datetime.timedelta(seconds=600))], verbose_name='longer at the end')),
                    ('grace_for', models.CharField(choices=[('all', 'every chat'), ('typing', 'customers who typed and have not sent')], default='all', max_length=8, verbose_name='longer for')),
                    ('max_nudges', models.PositiveSmallIntegerField(default=1, validators=[scheduling.models.versioned.Bound(scheduling.errors.check_number, least=1, most=10)], verbose_name='most messages')),
                    ('growth', models.FloatField(default=2.0, validators=[scheduling.models.versioned.Bound(scheduling.errors.check_number, least=1, most=10)], verbose_name='growth of the gaps')),
                    ('retired_at', models.DateTimeField(blank=True, editable=False, null=True, verbose_name='retired at')),
                ],
                options={
                    'verbose_name': 'silence policy',
                    'verbose_name_plural': 'silence policies',
                    'ordering': ['key'],
                },
            ),
            migrations.CreateModel(
                name='HistoricalCampaign',
                fields=[
                    ('id', models.BigIntegerField(auto_created=True, blank=True, db_index=True, verbose_name='ID')),
                    ('version', models.PositiveIntegerField(default=1, editable=False, verbose_name='version')),
                    ('key', models.CharField(db_index=True, max_length=64, validators=[scheduling.models.versioned.Bound(scheduling.errors.check_key)], verbose_name='key')),
                    ('threshold', models.DurationField(default=datetime.timedelta(seconds=90), validators=[scheduling.models.versioned.Bound(scheduling.errors.check_span, least=datetime.timedelta(seconds=2), most=datetime.timedelta(seconds=43200))], verbose_name='silent after')),
                    ('starts_at', models.DateTimeField(verbose_name='starts at')),
                    ('ends_at', models.DateTimeField(verbose_name='ends at')),
                    ('enabled', models.BooleanField(default=True, verbose_name='enabled')),
                    ('retired_at', models.DateTimeField(blank=True, editable=False, null=True, verbose_name='retired at')),
                    ('history_id', models.AutoField(primary_key=True, serialize=False)),
                    ('history_date', models.DateTimeField(db_index=True)),
                    ('history_change_reason', models.CharField(max_length=100, null=True)),
                    ('history_type', models.CharField(choices=[('+', 'Created'), ('~', 'Changed'), ('-', 'Deleted')], max_length=1)),
                    ('history_user', models.ForeignKey(null=True, on_delete=django.db.models.deletion.SET_NULL, related_name='+', to=settings.AUTH_USER_MODEL)),
                ],
                options={
                    'verbose_name': 'historical campaign',
                    'verbose_name_plural': 'historical campaigns',
                    'ordering': ('-history_date', '-history_id'),
                    'get_latest_by': ('history_date', 'history_id'),
                },
                bases=(simple_history.models.HistoricalChanges, models.Model),
            ),
            migrations.CreateModel(
                name='Campaign',
                fields=[
                    ('id', models.BigAutoField(auto_created=True, primary_key=True, serialize=False, verbose_name='ID')),
                    ('version', models.PositiveIntegerField(default=1, editable=False, verbose_name='version')),
                    ('key', models.CharField(max_length=64, unique=True, validators=[scheduling.models.versioned.Bound(scheduling.errors.check_key)], verbose_name='key')),
                    ('threshold', models.DurationField(default=datetime.timedelta(seconds=90), validators=[scheduling.models.versioned.Bound(scheduling.errors.check_span, least=datetime.timedelta(seconds=2), most=datetime.timedelta(seconds=43200))], verbose_name='silent after')),
                    ('starts_at', models.DateTimeField(verbose_name='starts at')),
                    ('ends_at', models.DateTimeField(verbose_name='ends at')),
                    ('enabled', models.BooleanField(default=True, verbose_name='enabled')),
                    ('retired_at', models.DateTimeField(blank=True, editable=False, null=True, verbose_name='retired at')),
                ],
                options={
                    'verbose_name': 'campaign',
                    'verbose_name_plural': 'campaigns',
                    'ordering': ['starts_at', 'key'],
                    'constraints': [models.CheckConstraint(condition=models.Q(('ends_at__gt', models.F('starts_at'))), name='campaign_ends_after_it_starts')],
                },
            ),
        ]),
        migrations.RunPython(add_default_policy, migrations.RunPython.noop),
    ]
