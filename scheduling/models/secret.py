"""JSON that is stored encrypted: robot addresses and signing secrets are as good as passwords."""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Iterator
from functools import cache
from typing import Any

from cryptography.fernet import Fernet, InvalidToken, MultiFernet
from django.apps import apps
from django.conf import settings
from django.db import models, transaction


class Unreadable(Exception):
    """A stored secret that none of the keys can read."""


@cache
def _cipher() -> MultiFernet:
    secrets = settings.AFTERTOUCH_SECRETS_KEYS or [settings.SECRET_KEY]
    return MultiFernet([Fernet(base64.urlsafe_b64encode(hashlib.sha256(key.encode()).digest())) for key in secrets])


class EncryptedJSONField(models.TextField):  # type: ignore[type-arg]
    """A JSON value, encrypted with the first key of `AFTERTOUCH_SECRETS_KEYS` and read with any of them."""

    def get_prep_value(self, value: Any) -> str:
        return _cipher().encrypt(json.dumps(value, sort_keys=True).encode()).decode()

    def from_db_value(self, value: str | None, *_: Any) -> Any:
        if not value:
            return {}
        try:
            return json.loads(_cipher().decrypt(value.encode()))
        except InvalidToken as error:
            raise Unreadable(f"none of the keys can read {self.model._meta.label}.{self.name}") from error

    def to_python(self, value: Any) -> Any:
        return value

    def value_to_string(self, obj: models.Model) -> str:
        return json.dumps(self.value_from_object(obj))


def encrypt_anew() -> Iterator[tuple[str, int]]:
    """Each field's name and its rows, when they are all encrypted with the first key. Raises `Unreadable`.

    A row at a time, locked, so that nobody's change is written over; versions and history do not move.
    """
    for model in apps.get_models():
        for field in model._meta.get_fields():
            if isinstance(field, EncryptedJSONField):
                keys = list(model._default_manager.order_by("pk").values_list("pk", flat=True))
                yield f"{model._meta.label}.{field.name}", sum(_again(model, field.name, key) for key in keys)


@transaction.atomic
def _again(model: type[models.Model], field: str, key: Any) -> int:
    rows = model._default_manager.filter(pk=key)
    try:
        value = rows.select_for_update().values_list(field, flat=True).first()
    except Unreadable as error:
        raise Unreadable(f"{model._meta.label} {key}: none of the keys can read its {field}") from error
    return rows.update(**{field: value}) if value is not None else 0
