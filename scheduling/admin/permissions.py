"""What may be allowed, in words: Django stores the names of permissions in English, once for all readers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from django.apps import apps
from django.contrib.auth.models import Permission
from django.db.models import ManyToManyField
from django.http import HttpRequest
from django.utils.text import capfirst
from django.utils.translation import gettext as _
from django.utils.translation import gettext_lazy, gettext_noop

#: Said by a model in plain English, once for all readers.
PLAIN = (gettext_noop("Can publish a draft that was replayed"),)
VERBS = {
    "add": gettext_lazy("may be added"), "change": gettext_lazy("may be changed"),
    "delete": gettext_lazy("may be deleted"), "view": gettext_lazy("may be looked at"),
}  # fmt: skip


def in_words(permission: Permission) -> str:
    """`Outreach · channel · may be changed`."""
    kind = permission.content_type
    model = kind.model_class()
    if model is None:
        return str(permission)
    name = _(str(model._meta.verbose_name))
    if what := getattr(model, "instance_type", None):
        name = _("history of: %(what)s") % {"what": what._meta.verbose_name}
    verb, _under, rest = permission.codename.partition("_")
    own = dict(model._meta.permissions).get(permission.codename)
    said = own or (VERBS.get(verb) if rest == kind.model else None) or permission.name
    return f"{apps.get_app_config(kind.app_label).verbose_name} · {name} · {_(str(said))}"


class PermissionsInWords:
    """For the admins of users and groups."""

    def formfield_for_manytomany(self, db_field: ManyToManyField[Any, Any], request: HttpRequest, **named: Any) -> Any:
        field: Any = super().formfield_for_manytomany(db_field, request, **named)  # type: ignore[misc]
        if db_field.related_model is Permission:
            field.label_from_instance = in_words
        return field

    def get_deleted_objects(self, objs: Any, request: HttpRequest) -> tuple[list[Any], dict[str, int], set[Any], Any]:
        """Without the hundred rows that only link a group to what it may: they have no names to show."""
        deleted, counts, needed, protected = super().get_deleted_objects(objs, request)  # type: ignore[misc]
        links = [field.remote_field.through._meta for field in self.model._meta.many_to_many]  # type: ignore[attr-defined]
        beginnings = tuple(f"{capfirst(link.verbose_name)}: " for link in links)
        for link in links:
            counts.pop(link.verbose_name_plural, None)
        return _without(beginnings, deleted), counts, needed, protected


def _without(beginnings: tuple[str, ...], nested: Sequence[Any]) -> list[Any]:
    kept = [_without(beginnings, each) if isinstance(each, list) else each for each in nested]
    return [each for each in kept if each != [] and not (isinstance(each, str) and each.startswith(beginnings))]
