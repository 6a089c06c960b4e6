"""Forms that detect concurrent edits since their page was loaded.

Each field is submitted with the value that the page showed. A field that the user did not edit keeps its stored value,
so that saving one field reverts no other. If both edits changed the same field, the form shows an error and writes
nothing.
"""

from __future__ import annotations

from textwrap import shorten
from typing import Any, cast

from django import forms
from django.core.exceptions import ValidationError
from django.forms.boundfield import BoundField
from django.http import QueryDict
from django.utils.functional import cached_property
from django.utils.translation import gettext as _


class OptimisticLockForm(forms.ModelForm):  # type: ignore[type-arg]
    """Merge concurrent edits by field. Data without shown values, as from a program, is taken as it is."""

    def __getitem__(self, name: str) -> BoundField:
        field = self.fields.get(name)
        if field is not None:
            field.show_hidden_initial = self._is_merged(field) and (not self.is_bound or self._was_shown(name))
        return super().__getitem__(name)

    def full_clean(self) -> None:
        if self.is_bound and any(map(self._was_shown, self.fields)):
            self._submit_stored_values([name for name, field in self.fields.items() if self._is_merged(field)])
        super().full_clean()

    def _submit_stored_values(self, names: list[str]) -> None:
        """Submit the stored value of a field that the page did not offer.

        An automatic roll-out may have ended since and made the field editable again.
        """
        sent = cast(QueryDict, self.data).copy()
        for name in names:
            if not self._was_shown(name) and not isinstance(self.fields[name], forms.MultiValueField):
                sent.setlist(self.add_prefix(name), self._stored(name))
        self.data = sent

    @cached_property
    def changed_data(self) -> list[str]:
        """Return the fields that the user edited.

        Browsers send line ends as CRLF, so texts are compared as submitted.
        """
        return [name for name in super().changed_data if not self._is_as_shown(name)]

    def clean(self) -> dict[str, Any]:
        cleaned: dict[str, Any] = super().clean() or self.cleaned_data
        for name, field in self.fields.items():
            if not self[name].field.show_hidden_initial or self._shown(name) == self._stored(name):
                continue
            if name not in self.changed_data:
                cleaned[name] = field.clean(_format_as_submitted(field, self[name].initial))
            elif field.has_changed(self[name].initial, self[name].data):
                self.add_error(name, ValidationError(
                    _(
                        "Another user changed this after you opened the page. Current value: "
                            "%(value)s. Reload the page to change it."
                    ),
                    params={"value": shorten(", ".join(filter(None, self._stored(name))), 200) or "–"},
                ))  # fmt: skip
        return cleaned

    def _is_merged(self, field: forms.Field) -> bool:
        """Return whether a field is merged. Fields of a new row, hidden fields, and passwords and files are not."""
        silent = field.widget.is_hidden or isinstance(field.widget, forms.PasswordInput | forms.FileInput)
        return not self.instance._state.adding and not silent

    def _was_shown(self, name: str) -> bool:
        place = self.add_initial_prefix(name)
        return place in self.data or f"{place}_0" in self.data  # the second for a field with two inputs

    def _shown(self, name: str) -> list[str]:
        widget = self.fields[name].hidden_widget()
        return _normalize_texts(widget.value_from_datadict(self.data, self.files, self.add_initial_prefix(name)))

    def _stored(self, name: str) -> list[str]:
        field = self.fields[name]
        context = field.hidden_widget().get_context(name, field.prepare_value(self[name].initial), {})["widget"]
        return _normalize_texts(
            [each["value"] for each in context["subwidgets"]] if "subwidgets" in context else context["value"]
        )

    def _is_as_shown(self, name: str) -> bool:
        sent = self[name].data
        return (
            self[name].field.show_hidden_initial
            and not isinstance(self.fields[name], forms.BooleanField)
            and _normalize_texts(sent) == self._shown(name)
        )


def _normalize_texts(value: Any) -> list[str]:
    parts = value if isinstance(value, list | tuple) else [value]
    return ["" if each is None else str(each).replace("\r\n", "\n") for each in parts]


def _format_as_submitted(field: forms.Field, value: Any) -> Any:
    widget = field.widget
    return widget.decompress(value) if isinstance(widget, forms.MultiWidget) else field.prepare_value(value)
