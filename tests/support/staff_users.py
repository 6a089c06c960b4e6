"""Users of the back office."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from django.test import Client

# The ids of the groups' permissions that `bootstrap` would grant, by the number of permissions and the last of them.
_granted: dict[tuple[int, int], tuple[list[str], list[int]]] = {}
GRANT = """
WITH given AS (SELECT * FROM unnest(%(names)s::text[], %(ids)s::int[]) AS given (name, permission_id)),
made AS (INSERT INTO auth_group (name) SELECT DISTINCT name FROM given ON CONFLICT DO NOTHING RETURNING id, name)
INSERT INTO auth_group_permissions (group_id, permission_id)
SELECT id, permission_id FROM given JOIN (SELECT id, name FROM made UNION SELECT id, name FROM auth_group) AS own
USING (name) ON CONFLICT DO NOTHING
"""


def grant_permissions() -> None:
    """Grant as `bootstrap` does, in one statement. Its comparison of hundreds of permissions is long for each test."""
    from django.contrib.auth.models import Group, Permission
    from django.db import connection
    from django.db.models import Count, Max

    from scheduling.management.commands.bootstrap import Command

    found = Permission.objects.aggregate(number=Count("pk"), last=Max("pk"))
    key = found["number"], found["last"]
    if key not in _granted:
        Command().grant_permissions()
        pairs = list(Group.permissions.through.objects.values_list("group__name", "permission_id"))
        _granted[key] = [name for name, _ in pairs], [permission for _, permission in pairs]
        return
    with connection.cursor() as cursor:
        cursor.execute(GRANT, dict(zip(("names", "ids"), _granted[key], strict=True)))


@pytest.fixture
def static_root(settings, tmp_path) -> None:
    """WhiteNoise warns if no files are collected; the finders serve them here."""
    settings.STATIC_ROOT = tmp_path


@pytest.fixture
def as_member(db, static_root) -> Callable[[str], Client]:
    """Return a client logged in as a member of viewer, operator or editor, or as `admin`. In English."""
    from django.contrib.auth.models import Group, User

    def as_member(group: str) -> Client:
        grant_permissions()
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
def viewer(as_member) -> Client:
    return as_member("viewer")


@pytest.fixture
def operator(as_member) -> Client:
    return as_member("operator")


@pytest.fixture
def editor(as_member) -> Client:
    return as_member("editor")
