from django.db import migrations, models


class Migration(migrations.Migration):

    dependencies = [
        ('rpa_tasks', '0008_define_command'),
    ]

    operations = [
        migrations.AddField(
            model_name='scheduledround',
            name='tries',
            field=models.IntegerField(db_default=0, default=0),
        ),
    ]
