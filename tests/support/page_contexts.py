"""Keep the contexts that views give to their templates, and not those of each included template and each widget.

Django's test client copies the context of each template that is drawn: a form of the back office draws hundreds. No
test reads the others. Those of included and parent templates add few names to that of the page.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
from django.template import Context, RequestContext, Template
from django.test import utils
from django.test.signals import template_rendered


def pytest_configure() -> None:
    def render(template: Template, context: Context) -> str:
        if context.template is template and isinstance(context, RequestContext):
            template_rendered.send(sender=template, template=template, context=context)
        return template.nodelist.render(context)

    utils.instrumented_test_render = render


@pytest.fixture
def hide_menu(monkeypatch) -> Callable[[], None]:
    """Draw no menu from now on. It is the same on each page, and asks for many rights and counts rows each time."""

    def hide_menu() -> None:
        from django.contrib import admin

        monkeypatch.setattr(admin.site.__class__, "get_sidebar_list", lambda site, request: [])

    return hide_menu
