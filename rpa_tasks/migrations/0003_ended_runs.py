from django.db import migrations, models
from django.db.models import Q


class Migration(migrations.Migration):
    """While runs end: nothing waits for the index. One that was cut off before is made anew."""

    atomic = False
    dependencies = [
        ('rpa_tasks', '0002_rare_states'),
    ]

    operations = [
        migrations.SeparateDatabaseAndState(
            state_operations=[
                migrations.AddIndex(
                    model_name='run',
                    index=models.Index(fields=['ended_at'], name='rpa_run_ended', condition=~Q(outcome='held')),
                ),
            ],
            database_operations=[
                migrations.RunSQL(
                    [
                        'DROP INDEX CONCURRENTLY IF EXISTS rpa_run_ended',
                        "CREATE INDEX CONCURRENTLY rpa_run_ended ON rpa_tasks_run (ended_at)"
                        " WHERE NOT (outcome = 'held')",
                    ],
                    ['DROP INDEX CONCURRENTLY IF EXISTS rpa_run_ended'],
                ),
            ],
        ),
    ]
