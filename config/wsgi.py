from __future__ import annotations

import os

# The default is production: a server without the variable must not run with the published local key.
os.environ.setdefault("DJANGO_SETTINGS_MODULE", "config.settings.production")

from django.core.wsgi import get_wsgi_application

import config.celery.application  # noqa: F401  (before anything publishes)

application = get_wsgi_application()
