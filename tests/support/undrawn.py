"""What a view gives to its template, without the drawing: it takes most of the time of a page.

`tests/language` and `tests/security` draw every page.
"""

from __future__ import annotations

from typing import Any
from unittest import mock

from django.http import HttpResponse
from django.template.response import SimpleTemplateResponse
from django.test import Client


def read_context(client: Client, url: str, data: Any = None) -> dict[str, Any]:
    """The context of a page."""
    return _read(client.get, url, data)


def read_refusal(client: Client, url: str, data: Any = None) -> dict[str, Any]:
    """The context of the form that is shown again with its errors."""
    return _read(client.post, url, data)


def _read(ask: Any, url: str, data: Any) -> dict[str, Any]:
    with mock.patch.object(SimpleTemplateResponse, "rendered_content", ""):
        answer: HttpResponse = ask(url, data or {})
    assert answer.status_code == 200, (url, answer.status_code, answer.get("Location"))
    return answer.context_data
