"""Form fields for what flows say: words of a command, exit codes, JSON."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any

from django import forms
from django.core.exceptions import ValidationError
from django.utils.translation import gettext as _
from unfold.widgets import UnfoldAdminTextareaWidget, UnfoldAdminTextInputWidget

from scheduling.admin.form_fields import TextLikeField, pairs
from scheduling.admin.labels import complaint
from scheduling.strict_text import FIELD_SIZE, InvalidText, read_json

MOST_JSON = 4 * FIELD_SIZE  #: characters; payloads and schemas have closer limits of their own


class CommandField(TextLikeField):
    """The words of a command, one a line: nothing is quoted and no shell reads it. A word that a line cannot hold, as
    an empty one, stands there in JSON."""

    def __init__(self, **kwargs: Any) -> None:
        kwargs.setdefault(
            "widget", UnfoldAdminTextareaWidget(attrs={"rows": 11, "class": "at-mono", "spellcheck": "false"})
        )
        super().__init__(strip=False, **kwargs)

    def write(self, value: Iterable[str]) -> str:
        return "\n".join(_as_line(str(word)) for word in value)

    def to_python(self, value: Any) -> Any:
        lines = (super().to_python(value) or "").splitlines()
        return [_as_word(line.strip()) for line in lines if line.strip()]


def _as_line(word: str) -> str:
    fits = word and word == word.strip() and len(word.splitlines()) == 1 and not word.startswith('"')
    return word if fits else json.dumps(word, ensure_ascii=False)


def _as_word(line: str) -> str:
    if line.startswith('"'):
        try:
            word = read_json(line)
        except InvalidText:
            word = None
        if isinstance(word, str):
            return word
        raise ValidationError(_("“%(line)s” begins with a quotation mark but is not a JSON text") % {"line": line})
    return line


class ExitCodesField(TextLikeField):
    """`business=65 66, session=77`."""

    widget = UnfoldAdminTextInputWidget

    def write(self, value: dict[str, list[int]]) -> str:
        return ", ".join(f"{name}={' '.join(map(str, codes))}" for name, codes in value.items())

    def to_python(self, value: Any) -> Any:
        return {name: _codes(codes) for name, codes in pairs(super().to_python(value) or "")}


def _codes(text: str) -> list[int]:
    try:
        return [int(each) for each in text.split()]
    except ValueError:
        raise ValidationError(_("“%(given)s” must be numbers with spaces between them") % {"given": text}) from None


class JsonField(TextLikeField):
    """A JSON object; empty means an empty one."""

    def __init__(self, **kwargs: Any) -> None:
        kwargs.setdefault("required", False)
        kwargs.setdefault(
            "widget", UnfoldAdminTextareaWidget(attrs={"rows": 5, "class": "at-mono", "spellcheck": "false"})
        )
        super().__init__(**kwargs)

    def write(self, value: Any) -> str:
        return json.dumps(value, ensure_ascii=False, indent=2) if value else ""

    def has_changed(self, initial: Any, data: Any) -> bool:
        try:
            return bool(self.to_python(data) != (initial or {}))
        except forms.ValidationError:
            return True

    def to_python(self, value: Any) -> Any:
        text = (super().to_python(value) or "").strip()
        try:
            data = read_json(text, most=MOST_JSON) if text else {}
        except InvalidText as error:
            raise ValidationError(_("This is not JSON: %(error)s") % {"error": complaint(str(error))}) from None
        if not isinstance(data, dict):
            raise ValidationError(_("It must be an object in braces."))
        return data
