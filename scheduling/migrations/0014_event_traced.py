from django.db import migrations, models
from django.db.models import Q


class Migration(migrations.Migration):
    """While events come in: nothing waits for the index. One that was cut off before is made anew."""

    atomic = False
    dependencies = [
        ('scheduling', '0013_rare_states'),
    ]

    operations = [
        migrations.SeparateDatabaseAndState(
            state_operations=[
                migrations.AddIndex(
                    model_name='event',
                    index=models.Index(fields=['trace_id'], name='event_traced', condition=Q(trace_id__isnull=False)),
                ),
            ],
            database_operations=[
                migrations.RunSQL(
                    [
                        'DROP INDEX CONCURRENTLY IF EXISTS event_traced',
                        'CREATE INDEX CONCURRENTLY event_traced ON scheduling_event (trace_id)'
                        ' WHERE trace_id IS NOT NULL',
                    ],
                    ['DROP INDEX CONCURRENTLY IF EXISTS event_traced'],
                ),
            ],
        ),
    ]
