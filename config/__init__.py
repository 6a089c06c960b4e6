"""How Aftertouch is put together. Importing it gives Celery its application, so that `APP=config` is enough."""

from __future__ import annotations
