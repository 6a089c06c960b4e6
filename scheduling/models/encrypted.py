"""Store JSON encrypted: robot addresses and signing secrets are equivalent to passwords."""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Iterator, Mapping
from functools import cache
from typing import Any, NoReturn

from cryptography.fernet import Fernet, InvalidToken, MultiFernet
from django.apps import apps
from django.conf import settings
from django.db import models, transaction


class Unreadable(Exception):
    """None of the keys can decrypt a stored secret."""


class Sealed(Mapping[str, Any]):
    """The placeholder of a secret that cannot be decrypted.

    Reading it raises `Unreadable`. Listing, linking and saving its row works and keeps the stored value.
    """

    def __init__(self, stored: str, where: str) -> None:
        self.stored = stored
        self.where = where

    def open(self) -> NoReturn:
        raise Unreadable(f"none of the keys can read {self.where}")

    def __getitem__(self, name: str) -> NoReturn:
        self.open()

    def __iter__(self) -> NoReturn:
        self.open()

    def __len__(self) -> NoReturn:
        self.open()

    def __bool__(self) -> bool:
        return True

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sealed) and other.stored == self.stored

    def __hash__(self) -> int:
        return hash(self.stored)

    def __repr__(self) -> str:
        return f"<unreadable {self.where}>"


@cache
def build_cipher(first: str = "") -> MultiFernet:
    """Return the cipher. `first` is a setting whose keys come before the usual ones."""
    own = getattr(settings, first) if first else []
    secrets = [*own, *(settings.AFTERTOUCH_SECRETS_KEYS or [settings.SECRET_KEY])]
    return MultiFernet([Fernet(base64.urlsafe_b64encode(hashlib.sha256(key.encode()).digest())) for key in secrets])


def encrypt_text(text: str, first: str = "") -> str:
    """Encrypt with the first key of `AFTERTOUCH_SECRETS_KEYS`."""
    return build_cipher(first).encrypt(text.encode()).decode()


def decrypt_text(stored: str | bytes, first: str = "") -> str:
    """Decrypt with any of the keys. Raises `Unreadable`."""
    try:
        return build_cipher(first).decrypt(stored).decode()
    except InvalidToken:
        raise Unreadable("none of the keys can read it") from None


class EncryptedJSONField(models.TextField):  # type: ignore[type-arg]
    """A JSON value, encrypted with the first key of `AFTERTOUCH_SECRETS_KEYS` and decrypted with any of them."""

    first_keys = ""  #: setting whose keys come before them

    def get_prep_value(self, value: Any) -> str:
        if isinstance(value, Sealed):
            return value.stored
        return encrypt_text(json.dumps(value, sort_keys=True), self.first_keys)

    def from_db_value(self, value: str | None, *_: Any) -> Any:
        """Return the decrypted value, or `Sealed` if no key can decrypt it."""
        if not value:
            return {}
        try:
            return json.loads(decrypt_text(value, self.first_keys))
        except Unreadable:
            return Sealed(value, f"{self.model._meta.label}.{self.name}")

    def to_python(self, value: Any) -> Any:
        return value

    def value_to_string(self, obj: models.Model) -> str:
        return json.dumps(self.value_from_object(obj), default=dict)  # raises `Unreadable` for a sealed value


class NodeSecretField(EncryptedJSONField):
    """A secret that execution nodes read with `AFTERTOUCH_RPA_SECRETS_KEYS`, without the key of all other secrets."""

    first_keys = "AFTERTOUCH_RPA_SECRETS_KEYS"

    def get_prep_value(self, value: Any) -> str:
        """Return the stored text: empty for no secret, which a node without the keys can read, too."""
        return super().get_prep_value(value) if value else ""


def reencrypt_secrets() -> Iterator[tuple[str, int]]:
    """Encrypt all stored secrets with the first key. Yield each field's name and number of rows.

    Locks one row at a time, so that no concurrent change is overwritten. Versions and history stay unchanged.
    Idempotent.

    Raises:
        Unreadable: no key can decrypt a value.
    """
    for model in apps.get_models():
        for field in model._meta.get_fields():
            if isinstance(field, EncryptedJSONField):
                keys = list(model._default_manager.order_by("pk").values_list("pk", flat=True))
                yield f"{model._meta.label}.{field.name}", sum(_reencrypt_row(model, field.name, key) for key in keys)


@transaction.atomic
def _reencrypt_row(model: type[models.Model], field: str, key: Any) -> int:
    rows = model._default_manager.filter(pk=key)
    value = rows.select_for_update().values_list(field, flat=True).first()
    if isinstance(value, Sealed):
        raise Unreadable(f"{model._meta.label} {key}: none of the keys can read its {field}")
    return rows.update(**{field: value}) if value is not None else 0
