"""Who may see and who may edit, and a house of chats behind the pages."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from django.contrib.auth.models import Group, User
from django.test import Client
from django.urls import reverse

from scheduling.management.commands.bootstrap import Command


@pytest.fixture(autouse=True)
def static_root(settings: Any, tmp_path: Path) -> None:
    """WhiteNoise warns where nobody has collected files yet; the finders serve them here."""
    settings.STATIC_ROOT = tmp_path


@pytest.fixture
def as_member(db: None) -> Callable[[str], Client]:
    """A client logged in as a member of viewer, operator or editor, in English."""

    def as_member(group: str) -> Client:
        Command().grant_permissions()
        user = User.objects.create_user(group, password="x", is_staff=True)
        user.groups.add(Group.objects.get(name=group))
        client = Client(headers={"accept-language": "en"})
        client.force_login(user, backend="django.contrib.auth.backends.ModelBackend")
        client.cookies["django_language"] = "en"
        return client

    return as_member


@pytest.fixture
def editor(as_member: Callable[[str], Client]) -> Client:
    return as_member("editor")


def url(name: str, *args: Any) -> str:
    return reverse(f"admin:chat_sessions_{name}", args=args)


def text(answer: Any) -> str:
    assert answer.status_code == 200, answer
    return str(answer.content.decode())
