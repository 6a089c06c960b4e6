from django.db import migrations, models
from django.db.models import Q


class Migration(migrations.Migration):
    """While touches are written: nothing waits for the index. One that was cut off before is made anew."""

    atomic = False
    dependencies = [
        ('scheduling', '0004_failed_logins'),
    ]

    operations = [
        migrations.SeparateDatabaseAndState(
            state_operations=[
                migrations.AddIndex(
                    model_name='touch',
                    index=models.Index(
                        fields=['settled_at'], name='touch_ended', condition=Q(settled_at__isnull=False)
                    ),
                ),
            ],
            database_operations=[
                migrations.RunSQL(
                    [
                        'DROP INDEX CONCURRENTLY IF EXISTS touch_ended',
                        'CREATE INDEX CONCURRENTLY touch_ended ON scheduling_touch (settled_at)'
                        ' WHERE settled_at IS NOT NULL',
                    ],
                    ['DROP INDEX CONCURRENTLY IF EXISTS touch_ended'],
                ),
            ],
        ),
    ]
