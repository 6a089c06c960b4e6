"""The first page after the login; `tests/language` and `tests/security` open all others."""

from __future__ import annotations

import re

import pytest
from django.test import Client
from django.urls import reverse

pytestmark = pytest.mark.django_db


def test_login_leads_to_the_overview_in_the_chosen_language_without_external_resources(
    viewer: Client, client: Client
) -> None:
    answer = client.post(reverse("admin:login"), {"username": "viewer", "password": "x"})
    assert answer["location"] == reverse("admin:index")
    client.post("/i18n/setlang/", {"language": "zh-hans"})
    page = client.get(reverse("admin:index")).content.decode()
    assert "总览" in page
    assert not re.search(r'(src|href)="(https?:)?//', page)
