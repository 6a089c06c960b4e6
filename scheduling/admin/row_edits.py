"""Edits of configuration rows: lost updates, old versions, drafts."""

from __future__ import annotations

from collections.abc import Callable
from datetime import datetime
from functools import cached_property, partial
from typing import Any, ClassVar

from django import forms
from django.contrib import messages
from django.core.exceptions import PermissionDenied, ValidationError
from django.db import connection, transaction
from django.db.models import Model
from django.forms.models import model_to_dict
from django.http import Http404, HttpRequest, HttpResponse
from django.shortcuts import redirect
from django.utils.crypto import salted_hmac
from django.utils.translation import gettext as _
from django.utils.translation import gettext_lazy
from unfold.dataclasses import UnfoldAction
from unfold.enums import ActionVariant

from scheduling.admin.labels import translate_error, translate_errors
from scheduling.admin.shown_values import describe_instant, find_address
from scheduling.configuration.file.apply import InvalidConfiguration
from scheduling.error_text import ErrorText
from scheduling.errors import Conflict
from scheduling.experiments import drafts
from scheduling.ids import parse_number
from scheduling.models.encrypted import Sealed
from scheduling.models.versioned import lock_for_write

VERSION_FIELD = "row_version"
CONFLICT = "conflict"  #: code of the error of a row that changed after the page showed it


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
        edited = []
        for name in super().changed_data:
            sent, shown = self[name].data, self.fields[name].prepare_value(self[name].initial)
            is_same = isinstance(sent, str) and isinstance(shown, str) and sent.replace("\r\n", "\n") == shown
            if name != VERSION_FIELD and not is_same:
                edited.append(name)
        return edited

    def clean(self) -> dict[str, Any]:
        shown = self.cleaned_data.pop(VERSION_FIELD, "")
        for name, field in self.fields.items():
            if field.disabled:  # its value is that of the row as it was before the lock
                self.cleaned_data.pop(name, None)
        if not self.instance._state.adding:
            # The stored row is loaded, so that a save overwrites no column that the form does not have.
            try:
                if connection.in_atomic_block:
                    with transaction.atomic():
                        rows = lock_for_write(type(self.instance)._base_manager.all())
                        self.instance.refresh_from_db(from_queryset=rows)
                else:  # a preview, which saves nothing
                    self.instance.refresh_from_db()
            except self.instance.DoesNotExist:
                self.add_error(self.error_field, _("Deleted after you opened the page."))
                return super().clean() or self.cleaned_data
            if shown and shown != self._compute_version():
                self.add_error(self.error_field, ValidationError(_describe_last_change(self.instance), CONFLICT))
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
        for path, found in errors.update_error_dict({}).items():
            own = [each.message for each in found if isinstance(each.message, ErrorText)]
            for message in own:
                self.add_row_error(path, message)
            if not own:
                others[path] = found
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

    def _compute_version(self) -> str:
        """Return a digest of the columns that the form writes.

        The row's own version does not serve: some models have none, and jobs and roll-outs increment it as well.
        """
        if self.instance._state.adding:
            return ""
        written = {name for name, field in self.fields.items() if not field.disabled}
        names, meta = {*written, *self.written_columns}, self.instance._meta
        values = [getattr(self.instance, each.attname) for each in meta.fields if each.name in names]
        stored = [each.stored if isinstance(each, Sealed) else each for each in values]
        links = [getattr(self.instance, each.name) for each in meta.many_to_many if each.name in names]
        stored += [list(each.order_by("pk").values_list("pk", flat=True)) for each in links]
        return salted_hmac(VERSION_FIELD, repr((sorted(written), stored))).hexdigest()


class OptimisticLockFormSet(forms.BaseInlineFormSet):  # type: ignore[type-arg]
    """Compare also the rows that the page removes: Django ignores the errors of their forms."""

    def clean(self) -> None:
        super().clean()
        for form in self.initial_forms:
            if self._should_delete_form(form):  # type: ignore[attr-defined]
                errors = [each for found in form.errors.as_data().values() for each in found]
                if conflicts := [each for each in errors if each.code == CONFLICT]:
                    raise ValidationError(conflicts)


def _describe_last_change(row: Model) -> str:
    last = row.history.first() if hasattr(row, "history") else None
    if last is None:
        return _("Changed after you opened the page. Reload the page to see the current values.")
    return _("Changed by %(who)s at %(time)s. Reload the page to see the current values.") % {
        "who": last.history_user or _("system or configuration file"),
        "time": describe_instant(last.history_date),
    }


PARAMETER = "restore"  #: of the form's address: the id of a version


def find_version(request: HttpRequest, row: Any) -> Any:
    """Return the version that the form shows instead of the current values; None for most requests.

    Raises:
        Http404: the row has no such version.
    """
    chosen = request.GET.get(PARAMETER)
    if not chosen or request.method != "GET" or row is None:
        return None
    number = parse_number(chosen)
    version = None if number is None else row.history.filter(history_id=number).first()
    if version is None:
        raise Http404
    return version


def show_values_at(form_class: type[forms.ModelForm[Any]], at: datetime, reason: str) -> type[forms.ModelForm[Any]]:
    """Return the form with the values that its row had at an instant. A save compares with the current values."""

    class RestoringForm(form_class):  # type: ignore[valid-type,misc]
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            row = kwargs.get("instance")
            if row is not None and row.pk:
                past = row.history.as_of(at) if row.history.filter(history_date__lte=at).exists() else row
                values = {name: value for name, value in model_to_dict(past).items() if name in self.base_fields}
                kwargs["initial"] = {**values, "change_reason": reason, **(kwargs.get("initial") or {})}
            super().__init__(*args, **kwargs)

    return RestoringForm


class RestorableAdmin:
    """Let `?restore=<version>` fill the form of a row and of its inlines with an old version."""

    def get_form(self: Any, request: HttpRequest, obj: Any = None, change: bool = False, **kwargs: Any) -> Any:
        form_class = super().get_form(request, obj, change, **kwargs)  # type: ignore[misc]
        # Viewers get the stored row: they could take old values for those of now.
        version = find_version(request, obj) if change and self.has_change_permission(request, obj) else None
        return show_values_at(form_class, version.history_date, describe_version(version)) if version else form_class

    def get_formsets_with_inlines(self: Any, request: HttpRequest, obj: Any = None) -> Any:
        version = find_version(request, obj) if self.has_change_permission(request, obj) else None
        for formset, inline in super().get_formsets_with_inlines(request, obj):  # type: ignore[misc]
            if version and hasattr(formset.model, "history"):
                formset.form = show_values_at(formset.form, version.history_date, "")
            yield formset, inline

    def change_view(
        self: Any, request: HttpRequest, object_id: str, form_url: str = "", extra_context: Any = None
    ) -> HttpResponse:
        if request.method == "GET" and PARAMETER in request.GET:
            version = find_version(request, self.get_object(request, object_id))
            if version is not None and self.has_change_permission(request):
                text = _("The form shows the %(version)s. Nothing has changed yet: check the values and save.")
                messages.info(request, text % {"version": describe_version(version)})
        answer: HttpResponse = super().change_view(request, object_id, form_url, extra_context)  # type: ignore[misc]
        return answer

    def response_change(self: Any, request: HttpRequest, obj: Any) -> HttpResponse:
        # "" for rows with texts: a version of the row does not date the edit of a text.
        before = None if self.inlines else obj.history.order_by("-history_id")[1:].values_list("pk", flat=True).first()
        request.undo_link = f"{self.url('change', obj.pk)}?{PARAMETER}={before}" if before else ""  # type: ignore[attr-defined]
        answer: HttpResponse = super().response_change(request, obj)  # type: ignore[misc]
        return answer

    def message_user(
        self, request: HttpRequest, message: Any, level: Any = messages.INFO, extra_tags: str = "",
        fail_silently: bool = False,
    ) -> None:  # fmt: skip
        """Add to the message of an edit the address of the form with the values before it."""
        tags = extra_tags or getattr(request, "undo_link", "")
        super().message_user(request, message, level, tags, fail_silently)  # type: ignore[misc]

    def restore_link(self: Any, request: HttpRequest, version: Any) -> str:
        """Return the address that restores a version; "" for the current one and for users who may not change."""
        row = self.get_object(request, str(version.instance.pk))
        if row is None or not super().has_change_permission(request, row):  # type: ignore[misc]
            return ""
        if row.history.first().pk == version.pk:
            return ""
        return f"{find_address(row)}?{PARAMETER}={version.pk}"


def describe_version(version: Any) -> str:
    return _("version of %(time)s") % {"time": describe_instant(version.history_date)}


BUTTON = "_try_draft"  #: name of the button beside “Save”


class DraftableAdmin:
    """Offer “Try on the last 7 days” on the forms of rows that a draft can hold.

    The form is checked and saved as usual, in a transaction that is rolled back.
    """

    def may_try_draft(self: Any, request: HttpRequest) -> bool:
        return request.user.has_perm("scheduling.add_configdraft") and drafts.is_draftable(self.model)

    def get_actions_submit_line(self: Any, request: HttpRequest, object_id: Any) -> list[UnfoldAction]:
        found: list[UnfoldAction] = super().get_actions_submit_line(request, object_id)  # type: ignore[misc]
        if not self.may_try_draft(request):
            return found  # before a query for the row
        row = self.get_object(request, str(object_id)) if object_id else None
        if not (self.has_change_permission(request, row) if object_id else self.has_add_permission(request)):
            return found
        button = UnfoldAction(
            action_name=BUTTON, method=lambda *_: None, description=gettext_lazy("Try on the last 7 days"), path="",
            attrs={"name": BUTTON}, icon="psychology_alt", variant=ActionVariant.DEFAULT,
        )  # fmt: skip
        return [*found, button]

    def changeform_view(
        self: Any, request: HttpRequest, object_id: str | None = None, form_url: str = "", extra_context: Any = None
    ) -> HttpResponse:
        context = {**(extra_context or {})}
        if not object_id:  # Unfold lists the buttons for existing rows only
            context["actions_submit_line"] = self.get_actions_submit_line(request, None)
        show = partial(super().changeform_view, request, object_id, form_url, context)  # type: ignore[misc]
        if request.method != "POST" or BUTTON not in request.POST:
            return show()  # type: ignore[no-any-return]
        if not self.may_try_draft(request):
            raise PermissionDenied
        return _try_edit(request, show)

    def get_form(self, request: HttpRequest, *args: Any, **kwargs: Any) -> Any:
        """Return the form, with the errors of a draft that could not take it: it is then shown again."""
        form_class = super().get_form(request, *args, **kwargs)  # type: ignore[misc]
        refusals: list[str] = getattr(request, "refusals", [])

        class RefusedForm(form_class):  # type: ignore[valid-type,misc]
            def clean(self) -> dict[str, Any]:
                cleaned: dict[str, Any] = super().clean()
                self.add_error(None, refusals)
                return cleaned

        return RefusedForm if refusals else form_class

    def message_user(self, request: HttpRequest, *args: Any, **kwargs: Any) -> None:
        """Show no message of a save that is rolled back."""
        if BUTTON not in request.POST:
            super().message_user(request, *args, **kwargs)  # type: ignore[misc]


def _try_edit(request: HttpRequest, show: Callable[[], HttpResponse]) -> HttpResponse:
    """Save the form into the draft. An invalid form is shown with its errors."""
    answers: list[HttpResponse] = []

    def save() -> bool:
        answers.append(show())
        return answers[-1].status_code == 302

    try:
        is_kept = drafts.capture_edit(request.user, save)
    except (Conflict, InvalidConfiguration) as error:
        request.refusals = translate_errors(error)  # type: ignore[attr-defined]
        return show()  # again, with what was typed
    if is_kept:
        messages.success(request, _("The edit is in your draft. The live configuration has not changed."))
        return redirect("admin:scheduling_configdraft_mine")
    if answers[-1].status_code == 302:
        messages.info(request, _("The form changes nothing that a draft can hold."))
        return redirect(request.get_full_path())
    return answers[-1]
