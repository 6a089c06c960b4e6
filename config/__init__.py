"""Project configuration. An import gives Celery its application, so `APP=config` is sufficient."""

from __future__ import annotations
