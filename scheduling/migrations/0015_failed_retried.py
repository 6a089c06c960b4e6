from django.db import migrations, models
from django.db.models import Q


class Migration(migrations.Migration):
    """While tasks fail: nothing waits for the index. One that was cut off before is made anew."""

    atomic = False
    dependencies = [
        ('scheduling', '0014_event_traced'),
    ]

    operations = [
        migrations.SeparateDatabaseAndState(
            state_operations=[
                migrations.AddIndex(
                    model_name='failedtask',
                    index=models.Index(
                        fields=['fingerprint', 'acted_at'], name='failed_retried', condition=Q(state='retried')
                    ),
                ),
            ],
            database_operations=[
                migrations.RunSQL(
                    [
                        'DROP INDEX CONCURRENTLY IF EXISTS failed_retried',
                        'CREATE INDEX CONCURRENTLY failed_retried ON scheduling_failedtask (fingerprint, acted_at)'
                        " WHERE state = 'retried'",
                    ],
                    ['DROP INDEX CONCURRENTLY IF EXISTS failed_retried'],
                ),
            ],
        ),
    ]
