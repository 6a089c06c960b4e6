from django.db import migrations, models
from django.db.models import Q


class Migration(migrations.Migration):
    """While jobs are written: nothing waits for the index. One that was cut off before is made anew."""

    atomic = False
    dependencies = [
        ('rpa_tasks', '0001_initial'),
    ]

    operations = [
        migrations.SeparateDatabaseAndState(
            state_operations=[
                migrations.AddIndex(
                    model_name='job',
                    index=models.Index(
                        fields=['task_id', 'state'],
                        name='rpa_job_rare',
                        condition=Q(state__in=('failed', 'unknown', 'cancelled')),
                    ),
                ),
            ],
            database_operations=[
                migrations.RunSQL(
                    [
                        'DROP INDEX CONCURRENTLY IF EXISTS rpa_job_rare',
                        'CREATE INDEX CONCURRENTLY rpa_job_rare ON rpa_tasks_job (task_id, state)'
                        " WHERE state IN ('failed', 'unknown', 'cancelled')",
                    ],
                    ['DROP INDEX CONCURRENTLY IF EXISTS rpa_job_rare'],
                ),
            ],
        ),
    ]
