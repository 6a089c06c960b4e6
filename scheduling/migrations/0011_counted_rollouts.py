from django.db import migrations, models


class Migration(migrations.Migration):

    dependencies = [
        ('scheduling', '0010_alerts'),
    ]

    operations = [
        migrations.AddField(
            model_name='guardedrollout',
            name='counted',
            field=models.JSONField(editable=False, null=True),
        ),
    ]
