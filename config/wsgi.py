from __future__ import annotations

import os

os.environ.setdefault("DJANGO_SETTINGS_MODULE", "config.settings.local")

from django.core.wsgi import get_wsgi_application

import config.celery  # noqa: F401  (before anything publishes)

application = get_wsgi_application()
