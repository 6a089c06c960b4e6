from django.db import migrations, models
from django.db.models import Q


class Migration(migrations.Migration):
    """While touches are written: nothing waits for the indexes. One that was cut off before is made anew."""

    atomic = False
    dependencies = [
        ('scheduling', '0012_opted_out'),
    ]

    operations = [
        migrations.SeparateDatabaseAndState(
            state_operations=[
                migrations.AddIndex(
                    model_name='touch',
                    index=models.Index(
                        fields=['task_id', 'state'],
                        name='touch_rare',
                        condition=Q(state__in=('failed', 'unknown', 'cancelled')),
                    ),
                ),
                migrations.AddIndex(
                    model_name='touch',
                    index=models.Index(fields=['task_id'], name='touch_paused', condition=~Q(parked='')),
                ),
            ],
            database_operations=[
                migrations.RunSQL(
                    [
                        'DROP INDEX CONCURRENTLY IF EXISTS touch_rare',
                        'CREATE INDEX CONCURRENTLY touch_rare ON scheduling_touch (task_id, state)'
                        " WHERE state IN ('failed', 'unknown', 'cancelled')",
                    ],
                    ['DROP INDEX CONCURRENTLY IF EXISTS touch_rare'],
                ),
                migrations.RunSQL(
                    [
                        'DROP INDEX CONCURRENTLY IF EXISTS touch_paused',
                        "CREATE INDEX CONCURRENTLY touch_paused ON scheduling_touch (task_id) WHERE NOT (parked = '')",
                    ],
                    ['DROP INDEX CONCURRENTLY IF EXISTS touch_paused'],
                ),
            ],
        ),
    ]
