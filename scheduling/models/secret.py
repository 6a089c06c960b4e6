"""JSON that is stored encrypted: robot addresses and signing secrets are as good as passwords."""

from __future__ import annotations

import base64
import hashlib
import json
from functools import cache
from typing import Any

from cryptography.fernet import Fernet, MultiFernet
from django.conf import settings
from django.db import models


@cache
def _cipher() -> MultiFernet:
    secrets = settings.AFTERTOUCH_SECRETS_KEYS or [settings.SECRET_KEY]
    return MultiFernet([Fernet(base64.urlsafe_b64encode(hashlib.sha256(key.encode()).digest())) for key in secrets])


class EncryptedJSONField(models.TextField):  # type: ignore[type-arg]
    """A JSON value, encrypted with the first key of `AFTERTOUCH_SECRETS_KEYS` and read with any of them."""

    def get_prep_value(self, value: Any) -> str:
        return _cipher().encrypt(json.dumps(value, sort_keys=True).encode()).decode()

    def from_db_value(self, value: str | None, *_: Any) -> Any:
        return json.loads(_cipher().decrypt(value.encode())) if value else {}

    def to_python(self, value: Any) -> Any:
        return value

    def value_to_string(self, obj: models.Model) -> str:
        return json.dumps(self.value_from_object(obj))
