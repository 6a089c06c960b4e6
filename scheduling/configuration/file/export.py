"""What is stored, as a file that would change nothing."""

from __future__ import annotations

from typing import Any

from django.db import transaction

from scheduling.configuration.file.apply import VERSION
from scheduling.configuration.file.registry import sections


def export(*, with_secrets: bool = False) -> dict[str, Any]:
    """One consistent picture of all sections."""
    document: dict[str, Any] = {"version": VERSION}
    with transaction.atomic():
        for name, section in sections().items():
            given = section.export(with_secrets=with_secrets)
            if given is not None:
                document[name] = given
    return document
