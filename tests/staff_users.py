"""Users of the back office."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from django.test import Client


@pytest.fixture
def static_root(settings: Any, tmp_path: Path) -> None:
    """WhiteNoise warns where nobody has collected files yet; the finders serve them here."""
    settings.STATIC_ROOT = tmp_path


@pytest.fixture
def as_member(db: None, static_root: None) -> Callable[[str], Client]:
    """A client logged in as a member of viewer, operator or editor, or as `admin`. English, so that texts are told."""
    from django.contrib.auth.models import Group, User

    from scheduling.management.commands.bootstrap import Command

    def as_member(group: str) -> Client:
        Command().grant_permissions()
        if group == "admin":
            user = User.objects.create_superuser("admin", password="x")
        else:
            user = User.objects.create_user(group, password="x", is_staff=True)
            user.groups.add(Group.objects.get(name=group))
        client = Client(headers={"accept-language": "en"})
        client.force_login(user, backend="django.contrib.auth.backends.ModelBackend")
        client.cookies["django_language"] = "en"
        return client

    return as_member


@pytest.fixture
def viewer(as_member: Callable[[str], Client]) -> Client:
    return as_member("viewer")


@pytest.fixture
def operator(as_member: Callable[[str], Client]) -> Client:
    return as_member("operator")


@pytest.fixture
def editor(as_member: Callable[[str], Client]) -> Client:
    return as_member("editor")
