"""Track the addresses of a row, to enable disabled receivers after a change."""

from __future__ import annotations

from hashlib import sha256
from typing import Any

from django.apps import apps
from django.db import models, transaction


def digest_of(address: object) -> str:
    """Return a digest that identifies an address without revealing it."""
    return sha256(str(address).encode()).hexdigest()


class Addressed(models.Model):
    """A row that holds addresses.

    A changed address enables the old and the new receiver again: a person has dealt with the receiver's rejection.
    """

    class Meta:
        abstract = True

    @classmethod
    def from_db(cls, *args: Any, **kwargs: Any) -> Any:
        found: Any = super().from_db(*args, **kwargs)
        found._held = set() if found.get_deferred_fields() else found.addresses_held()
        return found

    def save(self, *args: Any, **kwargs: Any) -> None:  # noqa: DJ012 (`from_db` comes first)
        before: set[str] = self.__dict__.get("_held", set())
        after = self.addresses_held()
        with transaction.atomic():
            super().save(*args, **kwargs)
            if changed := before ^ after:
                disabled = apps.get_model("scheduling", "DisabledTarget")._default_manager
                disabled.filter(target_digest__in=[digest_of(each) for each in sorted(changed)]).delete()
        self._held = after

    def addresses_held(self) -> set[str]:
        """Return the addresses that touches of this row go to."""
        raise NotImplementedError
