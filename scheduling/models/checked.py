"""Let `full_clean` check the values of a row together: for forms, configuration files and the API."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, ClassVar, TypeVar

from django.core.exceptions import ValidationError
from django.db import models
from django.db.models.expressions import DatabaseDefault

from scheduling.error_text import ErrorText
from scheduling.errors import InvalidInput
from scheduling.models.encrypted import Sealed

Rules = Callable[[Mapping[str, Any]], None]
SomeRules = TypeVar("SomeRules", bound=Callable[..., None])


class Checked(models.Model):
    """A row whose app has rules about its values, in its module `validation`.

    They are not methods, because they know channels and texts, which import the models.
    """

    rules: ClassVar[Rules | None] = None  #: raises `InvalidInput` by column; a dot leads inside a JSON column

    class Meta:
        abstract = True

    def clean(self) -> None:
        super().clean()
        rules = type(self).rules
        if rules is None:
            return
        try:
            rules(self._collect_values())
        except InvalidInput as error:
            found: dict[str, list[str]] = {}
            for each in error.errors:
                # Some words are a library's. Forms and files know the errors of rules by their type.
                text = each.message if isinstance(each.message, ErrorText) else ErrorText(each.message)
                found.setdefault(each.field, []).append(text)
            raise ValidationError(found) from None

    def _collect_values(self) -> dict[str, Any]:
        """Return the values by column, without those that cannot be read here. References are not loaded."""
        values = {}
        for field in self._meta.concrete_fields:
            value = self._state.fields_cache.get(field.name) or getattr(self, field.attname)
            if not isinstance(value, (Sealed, DatabaseDefault)):
                values[field.name] = value
        return values


def rules_of(model: type[Checked]) -> Callable[[SomeRules], SomeRules]:
    """Make a function the rules of a model. The app imports its module when it is ready."""

    def register(rules: SomeRules) -> SomeRules:
        model.rules = rules
        return rules

    return register
