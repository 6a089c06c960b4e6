"""Keep the contexts that views and forms give to their templates, and not one copy for each included template.

Django's test client copies the context of each template that it renders: a page of the back office includes hundreds.
No test reads those of an included or a parent template, which are that of the page with a few names more.
"""

from __future__ import annotations

from typing import Any

from django.template import Context, Template
from django.test import client


def pytest_configure() -> None:
    keep = client.store_rendered_templates  # type: ignore[attr-defined]

    def keep_of_outermost(store: Any, signal: Any, sender: Template, template: Template, context: Context, **rest: Any):
        if context.template is template:
            keep(store, signal, sender, template, context, **rest)

    client.store_rendered_templates = keep_of_outermost  # type: ignore[attr-defined]
