"""Parse the text of a configuration file, and export the stored configuration as one."""

from __future__ import annotations

from typing import Any

from django.db import transaction

from scheduling.configuration.file.sections import sections
from scheduling.error_text import ErrorText as _
from scheduling.strict_text import MAX_SIZE, InvalidText, read_yaml

VERSION = 1  #: of the format


def parse_document(raw: bytes) -> dict[str, Any]:
    """Parse a configuration file of at most `MAX_SIZE` bytes.

    Raises:
        InvalidText: with the line, if it is known.
    """
    if len(raw) > MAX_SIZE:
        raise InvalidText(_("the file must not be larger than %(most)s bytes", most=MAX_SIZE))
    try:
        document = read_yaml(raw.decode("utf-8-sig"))
    except UnicodeDecodeError:
        raise InvalidText(_("the file must be UTF-8")) from None
    if document is None:
        return {}
    if not isinstance(document, dict):
        raise InvalidText(_("the file must be a mapping of sections"))
    return document


def export_document(*, with_secrets: bool = False) -> dict[str, Any]:
    """Export all sections in one transaction."""
    document: dict[str, Any] = {"version": VERSION}
    with transaction.atomic():
        for name, section in sections().items():
            given = section.export(with_secrets=with_secrets)
            if given is not None:
                document[name] = given
    return document
