from django.db import migrations, models
from django.db.models import Q


class Migration(migrations.Migration):
    """While customers are written: nothing waits for the index. One that was cut off before is made anew."""

    atomic = False
    dependencies = [
        ('scheduling', '0011_counted_rollouts'),
    ]

    operations = [
        migrations.SeparateDatabaseAndState(
            state_operations=[
                migrations.AddIndex(
                    model_name='customer',
                    index=models.Index(
                        fields=['opted_out_at'], name='customer_opted_out', condition=Q(opted_out=True)
                    ),
                ),
            ],
            database_operations=[
                migrations.RunSQL(
                    [
                        'DROP INDEX CONCURRENTLY IF EXISTS customer_opted_out',
                        'CREATE INDEX CONCURRENTLY customer_opted_out ON scheduling_customer (opted_out_at)'
                        ' WHERE opted_out',
                    ],
                    ['DROP INDEX CONCURRENTLY IF EXISTS customer_opted_out'],
                ),
            ],
        ),
    ]
