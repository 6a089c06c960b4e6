"""The policy that holds for every tag without one of its own: a minute, and up to five seconds more."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

from django.db import migrations


def add(apps: Any, schema_editor: Any) -> None:
    apps.get_model("chat_sessions", "SilencePolicy").objects.get_or_create(
        tag="default", defaults={"threshold": timedelta(seconds=60), "jitter": timedelta(seconds=5)}
    )


class Migration(migrations.Migration):
    dependencies = [("chat_sessions", "0001_initial")]

    operations = [migrations.RunPython(add, migrations.RunPython.noop)]
