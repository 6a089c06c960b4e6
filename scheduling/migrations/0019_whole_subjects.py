from django.db import migrations, models


class Migration(migrations.Migration):
    """PostgreSQL widens varchar to text without a rewrite of the table."""

    dependencies = [("scheduling", "0018_login_succeeded_at")]

    operations = [
        migrations.AlterField(
            model_name="attempt",
            name="subject",
            field=models.TextField(blank=True, verbose_name="subject"),
        ),
    ]
