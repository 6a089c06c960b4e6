"""Forms that refuse to overwrite a change that another user made after the page was loaded."""

from __future__ import annotations

from functools import cached_property
from typing import Any, ClassVar

from django import forms
from django.core.exceptions import ValidationError
from django.db import connection, transaction
from django.db.models import Model
from django.utils.crypto import salted_hmac
from django.utils.translation import gettext as _

from scheduling.admin.labels import translate_error
from scheduling.admin.shown_values import describe_instant
from scheduling.error_text import ErrorText
from scheduling.models.encrypted import Sealed
from scheduling.models.versioned import lock_for_write

VERSION_FIELD = "row_version"


class OptimisticLockForm(forms.ModelForm):  # type: ignore[type-arg]
    """Submit the version of the row that the page showed, and compare it with the stored row on save.

    The comparison locks the row until the save's transaction ends, so the second of two concurrent saves shows the
    error. Data without a version, as from a program, is applied to the stored row.
    """

    row_version = forms.CharField(label="", required=False, widget=forms.HiddenInput)
    #: Columns that the form writes from fields of other names: the values of its attributes with these names.
    written_columns: ClassVar[tuple[str, ...]] = ()
    #: The field that shows the error; None for the top of the form, which stacked inlines do not have.
    error_field: ClassVar[str | None] = None

    def get_initial_for_field(self, field: forms.Field, field_name: str) -> Any:
        return (
            self._compute_version() if field_name == VERSION_FIELD else super().get_initial_for_field(field, field_name)
        )

    @cached_property
    def changed_data(self) -> list[str]:
        """Return the fields that the user edited. Browsers send line ends as CRLF, which is no edit."""
        return [name for name in super().changed_data if name != VERSION_FIELD and not self._is_same_text(name)]

    def clean(self) -> dict[str, Any]:
        shown = self.cleaned_data.pop(VERSION_FIELD, "")
        for name, field in self.fields.items():
            if field.disabled:  # its value is that of the row as it was before the lock
                self.cleaned_data.pop(name, None)
        if not self.instance._state.adding:
            try:
                self._lock_row()
            except self.instance.DoesNotExist:
                self.add_error(self.error_field, _("Deleted after you opened the page."))
                return super().clean() or self.cleaned_data
            if shown and shown != self._compute_version():
                self.add_error(self.error_field, _describe_last_change(self.instance))
        return super().clean() or self.cleaned_data

    def _post_clean(self) -> None:
        """Check the row with the values of the form. With an error the row keeps its former ones, for the page."""
        former, references = self.instance.__dict__.copy(), self.instance._state.fields_cache.copy()
        for name in self.written_columns:
            setattr(self.instance, name, getattr(self, name, getattr(self.instance, name)))
        super()._post_clean()  # type: ignore[misc]
        if self.errors:
            self.instance.__dict__.update(former)
            self.instance._state.fields_cache = references

    def _update_errors(self, errors: ValidationError) -> None:
        """Show each error of the row's rules at its field, in the reader's language. A wrong field keeps its error."""
        others = {}
        for path, found in errors.error_dict.items():
            own = [each.message for each in found if isinstance(each.message, ErrorText)]
            for message in own:
                self.add_row_error(path, message)
            if len(own) < len(found):
                others[path] = [each for each in found if not isinstance(each.message, ErrorText)]
        if others:
            super()._update_errors(ValidationError(others))  # type: ignore[misc]

    def add_row_error(self, path: str, message: str) -> None:
        field = self.find_error_field(path)
        if field not in self.errors:
            part = path.partition(".")[2] if field in self.fields else path
            words = translate_error(message)
            self.add_error(field, f"{part}: {words}" if part else words)

    def find_error_field(self, path: str) -> str | None:
        """Return the form field to which an error belongs; None for the whole form."""
        field = path.partition(".")[0].partition("[")[0]
        return field if field in self.fields else None

    def _lock_row(self) -> None:
        """Load the stored row, so that a save overwrites no column that the form does not have."""
        if not connection.in_atomic_block:  # a preview, which saves nothing
            self.instance.refresh_from_db()
            return
        with transaction.atomic():
            self.instance.refresh_from_db(from_queryset=lock_for_write(type(self.instance)._base_manager.all()))

    def _compute_version(self) -> str:
        """Return a digest of the columns that the form writes.

        The row's own version does not serve: some models have none, and jobs and roll-outs increment it as well.
        """
        if self.instance._state.adding:
            return ""
        written = {name for name, field in self.fields.items() if not field.disabled}
        names = {*written, *self.written_columns}
        values = [getattr(self.instance, each.attname) for each in self.instance._meta.fields if each.name in names]
        stored = [each.stored if isinstance(each, Sealed) else each for each in values]
        return salted_hmac(VERSION_FIELD, repr((sorted(written), stored))).hexdigest()

    def _is_same_text(self, name: str) -> bool:
        sent, shown = self[name].data, self.fields[name].prepare_value(self[name].initial)
        return isinstance(sent, str) and isinstance(shown, str) and sent.replace("\r\n", "\n") == shown


def _describe_last_change(row: Model) -> str:
    last = row.history.first() if hasattr(row, "history") else None
    if last is None:
        return _("Changed after you opened the page. Reload the page to see the current values.")
    return _("Changed by %(who)s at %(time)s. Reload the page to see the current values.") % {
        "who": last.history_user or _("system or configuration file"),
        "time": describe_instant(last.history_date),
    }
