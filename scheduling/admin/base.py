"""Base classes of back office pages: forms checked by field, history, read-only and large tables, retired rows."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from functools import cached_property, partial, wraps
from typing import Any, ClassVar, TypeVar, cast

from django import forms
from django.contrib import admin, messages
from django.contrib.admin.helpers import ACTION_CHECKBOX_NAME
from django.contrib.admin.utils import flatten_fieldsets, unquote
from django.contrib.auth import get_user_model
from django.contrib.messages.storage import default_storage
from django.core.exceptions import PermissionDenied, ValidationError
from django.core.paginator import Paginator
from django.db import IntegrityError, connection, models, transaction
from django.db.models import QuerySet
from django.http import Http404, HttpRequest, HttpResponse, HttpResponseBase, HttpResponseNotAllowed
from django.shortcuts import get_object_or_404, redirect, render
from django.template.response import TemplateResponse
from django.urls import URLPattern, path, reverse
from django.utils.decorators import method_decorator
from django.utils.html import format_html
from django.utils.text import capfirst
from django.utils.timezone import now
from django.utils.translation import gettext, gettext_lazy
from django.views.decorators.http import require_safe
from simple_history.admin import SimpleHistoryAdmin
from simple_history.template_utils import HistoricalRecordContextHelper
from unfold import fields as unfold_fields
from unfold.admin import ModelAdmin
from unfold.decorators import action, display
from unfold.paginator import InfinitePaginator
from unfold.templatetags import unfold_list
from unfold.utils import display_for_field
from unfold.widgets import UnfoldAdminDecimalFieldWidget, UnfoldAdminTextInputWidget

from scheduling.admin.form_fields import MASK, DurationField, NumberField
from scheduling.admin.labels import translate_error
from scheduling.admin.page_reads import count_within, render_from_replica
from scheduling.admin.row_edits import VERSION_FIELD, DraftableAdmin, OptimisticLockForm, RestorableAdmin
from scheduling.admin.shown_values import format_instant, render_tag
from scheduling.configuration.file.sections import list_users, sections
from scheduling.durations import format_duration
from scheduling.errors import AftertouchError, FieldError, InvalidInput, NotFound
from scheduling.ids import reveal_odd_characters
from scheduling.models.versioned import lock_for_write
from scheduling.monitoring.duration_text import describe_duration
from scheduling.operations.failed_tasks import Actor
from scheduling.policy.node_conditions import compile_condition
from scheduling.policy.send_times import format_window

# Unfold writes 500 bytes of classes into each cell of a list, two thirds of the page. `ops.css` styles the cells.
unfold_list.ROW_CLASSES[:] = ()
unfold_list.CHECKBOX_CLASSES[:] = ("action-checkbox",)
unfold_list.LINK_CLASSES[:] = ()

Decorated = TypeVar("Decorated", bound=Callable[..., Any])
#: Unfold's decorators, which are untyped, with the signature of what they decorate kept.
ops_action: Callable[..., Callable[[Decorated], Decorated]] = action
ops_display: Callable[..., Callable[[Decorated], Decorated]] = display

#: Columns with ids that other systems chose.
ID_COLUMNS = frozenset({"user_id", "shop_id", "session_id", "chat_id", "event_id", "dedupe_key"})


def _display_for_field(value: Any, field: Any, empty_value_display: str) -> str:
    """Show instants, durations and ids of columns and read-only fields as all pages do."""
    if isinstance(value, datetime):
        return format_instant(value)
    if isinstance(value, timedelta):
        return describe_duration(value) if value else "–"
    if field.name in ID_COLUMNS and isinstance(value, str):
        value = reveal_odd_characters(value)
    return display_for_field(value, field, empty_value_display)  # type: ignore[no-any-return]


unfold_list.display_for_field = unfold_fields.display_for_field = _display_for_field


def build_user_actor(request: HttpRequest, reason: str = "") -> Actor:
    """Return the actor that the history and failed tasks name for this request."""
    return Actor(request.user.get_username(), request.user, reason)  # type: ignore[arg-type]


def render_site_page(
    request: HttpRequest, template: str, title: Any, *, status: int = 200, **context: Any
) -> HttpResponse:  # fmt: skip
    """Render a page of the site that belongs to no model."""
    return render(request, template, {**admin.site.each_context(request), "title": title, **context}, status=status)


#: Lookups allowed after a filter's path: comparisons with a whole value.
WHOLE_VALUES = frozenset(
    ("exact", "in", "isnull", "gt", "gte", "lt", "lte", "year", "month", "day", "id__exact", "id__in", "pk__exact")
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Confirmation:
    """A question to the user, in most cases about one row, and what follows the answer."""

    title: str
    #: Called when the user confirms. Returns False if nothing changed, or a page. An `AftertouchError` refuses.
    act: Callable[[], object] = lambda: None
    button: str = ""  #: the title if empty
    text: str = ""
    facts: Sequence[str] = ()
    warning: str = ""
    problem: str = ""  #: why the user cannot confirm
    form: Any = None
    hidden: Sequence[tuple[str, Any]] = ()  #: sent with the answer, by name
    danger: bool = False
    done: str = ""  #: message after the act; none if empty, as for an act that writes its own
    unchanged: str = ""  #: message if nothing changed
    refused: str = ""  #: message of a refusal; the error's own words, at the form, if empty
    logged: str = ""  #: entry in the log of the row, for acts that leave no other trace
    back: str = ""  #: address; the row's page if empty
    changes: Sequence[Mapping[str, Any]] = ()  #: of a draft


def _show_refusal(request: HttpRequest, asked: Confirmation, error: AftertouchError) -> None:
    if asked.refused:
        messages.error(request, asked.refused)
        return
    fields = () if asked.form is None else asked.form.fields
    for each in error.errors if isinstance(error, InvalidInput) else [FieldError("", str(error))]:
        if each.field in fields:
            asked.form.add_error(each.field, translate_error(each.message))
        elif asked.form is None:
            messages.error(request, translate_error(str(each)))
        else:
            asked.form.add_error(None, translate_error(str(each)))


#: A method of an admin. It answers for one row with a page of its own, or with a question that the admin shows.
RowMethod = Callable[[Any, HttpRequest, Any], HttpResponseBase | Confirmation]


def row_action(
    label: Any = None, *, permission: str, icon: str = "", allowed: Callable[[Any], object] = lambda row: True,
    methods: Sequence[str] = ("GET", "HEAD", "POST"),
) -> Callable[[RowMethod], Any]:  # fmt: skip
    """Make an action on one row out of a method, whose name `actions_detail` must list.

    `permission` is a Django permission, or `view` or `change` of the row. A button in the bar of the page offers an
    action with a label where `allowed` returns true; one without a label has its place in a template, which gets
    `action_links`. The act itself must refuse what the row does not allow.
    """

    def decorate(method: Any) -> Any:
        # Unfold would look for the permission's row in the database at each start, also before the first migration.
        @ops_action(description=label, icon=icon, url_path=method.__name__.replace("_", "-"))
        @wraps(method)
        def view(self: Any, request: HttpRequest, object_id: str) -> Any:
            if not self.may(request, permission):
                raise PermissionDenied
            if request.method not in methods:
                return HttpResponseNotAllowed(methods)
            row = self.get_row_or_404(request, object_id)
            try:
                answer = method(self, request, row)
                return self.confirm(request, answer, row) if isinstance(answer, Confirmation) else answer
            except (NotFound, self.model.DoesNotExist):  # deleted since it was read
                raise Http404 from None

        view.permission, view.allowed, view.in_bar = permission, allowed, label is not None  # type: ignore[attr-defined]
        return view

    return decorate


def table_page(route: str, *permissions: str) -> Callable[[Decorated], Decorated]:
    """Make a page of the whole table out of a function, at this address below the list.

    The name of the attribute is that of the address. The user needs each of the permissions, as in `row_action`.
    """

    def decorate(method: Any) -> Any:
        @wraps(method)
        def view(self: Any, request: HttpRequest, *args: Any, **kwargs: Any) -> Any:
            if not all(self.may(request, each) for each in permissions):
                raise PermissionDenied
            return method(self, request, *args, **kwargs)

        view.route = route  # type: ignore[attr-defined]
        return view

    return decorate


class OpsPages:
    """A model's list and pages: strict lookups, addresses, confirmations, rows.

    Django lets a list's address query any column with any lookup. With `?addresses__phone__startswith=138` a viewer
    could find a hidden value digit by digit. So only the list's own filters count.
    """

    #: Lookups in links of this application that no filter declares.
    linked_lookups: ClassVar[tuple[str, ...]] = ()

    def lookup_allowed(self: Any, lookup: str, value: Any, request: HttpRequest | None = None) -> bool:
        if lookup in self.linked_lookups:
            return True
        first = lookup.partition("__")[0]
        columns = {field.name for field in self.model._meta.get_fields()}
        columns |= {field.attname for field in self.model._meta.concrete_fields}
        if first != "pk" and first not in columns:  # a filter's parameter
            return True
        filters = self.get_list_filter(request)
        paths = [each if isinstance(each, str) else each[0] for each in filters if isinstance(each, (str, tuple))]
        if any(lookup == path or lookup.removeprefix(f"{path}__") in WHOLE_VALUES for path in paths):
            return True
        return lookup in {getattr(each, "parameter_name", None) for each in filters} | {self.date_hierarchy}

    def layout(self, request: HttpRequest, obj: Any) -> list[Any] | None:
        """Return fieldsets that depend on the row or the user; None for the default."""
        return None

    def get_fieldsets(self: Any, request: HttpRequest, obj: models.Model | None = None) -> Any:
        """Add the version of a stored row, which its form compares (see `OptimisticLockForm`)."""
        fieldsets = self.layout(request, obj) or super().get_fieldsets(request, obj)  # type: ignore[misc]
        if obj is None or not self.has_change_permission(request, obj):
            return fieldsets
        (name, options), *others = fieldsets
        return [(name, {**options, "fields": (VERSION_FIELD, *options["fields"])}), *others]

    def get_fields(self, request: HttpRequest, obj: Any = None) -> Any:
        return [each for each in super().get_fields(request, obj) if each != VERSION_FIELD]  # type: ignore[misc]

    def changeform_view(self, request: HttpRequest, *args: Any, **kwargs: Any) -> HttpResponse:
        """Check a form again if what it refers to changed between its check and its save, which is rolled back.

        The form then names the field: of two users who add the same key at once, one is refused. The messages of the
        save that was rolled back are dropped.
        """
        show = partial(super().changeform_view, request, *args, **kwargs)  # type: ignore[misc]
        try:
            return show()  # type: ignore[no-any-return]
        except (IntegrityError, InvalidInput, ValidationError):
            request._messages = default_storage(request)  # type: ignore[attr-defined]
            return show()  # type: ignore[no-any-return]

    def _changeform_view(self, request: HttpRequest, *args: Any, **kwargs: Any) -> HttpResponse:
        """Check references after the save, in its transaction: others may enclose it, as that of a new user does."""
        answer: HttpResponse = super()._changeform_view(request, *args, **kwargs)  # type: ignore[misc]
        if request.method == "POST":
            connection.check_constraints()
        return answer

    def log_deletions(self, request: HttpRequest, queryset: Iterable[Any]) -> None:
        """Log one row after the other: Django stores several entries without the signal that the audit log needs."""
        for row in queryset:
            super().log_deletions(request, [row])  # type: ignore[misc]

    def get_urls(self: Any) -> list[URLPattern]:
        names = [name for name in dir(type(self)) if hasattr(getattr(type(self), name), "route")]
        pages = [(name, getattr(self, name)) for name in names]
        prefix, view = f"{self.opts.app_label}_{self.opts.model_name}", self.admin_site.admin_view
        own = [path(page.route, view(page), name=f"{prefix}_{name}") for name, page in pages]
        return [*own, *super().get_urls()]  # type: ignore[misc]

    def url(self: Any, name: str, *args: Any) -> str:
        """Return the address of `changelist`, `change` or a custom page of this model."""
        return reverse(f"admin:{self.opts.app_label}_{self.opts.model_name}_{name}", args=args)

    def page(self: Any, request: HttpRequest, template: str, title: str, **context: Any) -> TemplateResponse:
        request.current_app = self.admin_site.name
        return TemplateResponse(
            request,
            template,
            {**self.admin_site.each_context(request), "opts": self.opts, "title": title, **context},
        )

    def confirm(self: Any, request: HttpRequest, asked: Confirmation, row: Any = None) -> HttpResponse:
        """Show a confirmation, or do what it asks for and report it.

        The page is shown again if the form is wrong or `asked.act` adds an error to it. Without a row `asked.back` is
        set.
        """
        form, back = asked.form, asked.back or self.url("change", row.pk)
        if request.method == "POST" and (form is None or form.is_valid()):
            answer = self._carry_out(request, asked, row)
            if form is None or form.is_valid():
                return answer if isinstance(answer, HttpResponse) else redirect(back)
        return self.ask(request, asked, row)  # type: ignore[no-any-return]

    def ask(self: Any, request: HttpRequest, asked: Confirmation, row: Any = None) -> TemplateResponse:
        """Show a confirmation. The caller recognizes the answer by what `asked.hidden` holds."""
        return self.page(  # type: ignore[no-any-return]
            request, "ops/confirm.html", asked.title, back=asked.back or self.url("change", row.pk), form=asked.form,
            button=asked.button or asked.title, text=asked.text, facts=asked.facts, warning=asked.warning,
            problem=asked.problem, danger=asked.danger, hidden=asked.hidden, changes=asked.changes, original=row,
        )  # fmt: skip

    def _carry_out(self: Any, request: HttpRequest, asked: Confirmation, row: Any) -> object:
        if asked.problem:
            messages.error(request, asked.problem)
            return None
        try:
            result = asked.act()
        except AftertouchError as error:
            _show_refusal(request, asked, error)
            return None
        if result is False:
            if row is not None and not type(row)._base_manager.filter(pk=row.pk).exists():
                raise Http404
            unchanged = gettext("Nothing was changed: the state was already set.")
            messages.info(request, asked.unchanged or unchanged)
            return None
        if asked.logged:
            self.log_change(request, row, asked.logged)
        if asked.done:
            messages.success(request, asked.done)
        return result

    def may(self: Any, request: HttpRequest, permission: str) -> bool:
        """Return whether the user has a Django permission, or `view` or `change` of this model."""
        if "." in permission:
            return request.user.has_perm(permission)
        return bool(getattr(self, f"has_{permission}_permission")(request))

    def get_actions_detail(self: Any, request: HttpRequest, object_id: Any) -> Any:
        found = super().get_actions_detail(request, object_id)  # type: ignore[misc]
        found = [each for each in found if each.method.in_bar and self.may(request, each.method.permission)]
        row = self.get_object(request, unquote(str(object_id))) if found else None
        return [each for each in found if row is not None and each.method.allowed(row)]

    def action_links(self: Any, request: HttpRequest, row: Any) -> dict[str, str]:
        """Return the address of each action that the user may take on the row now, by name."""
        methods = [each.method for each in super().get_actions_detail(request, row.pk)]  # type: ignore[misc]
        allowed = [each for each in methods if self.may(request, each.permission) and each.allowed(row)]
        return {each.__name__: self.url(each.__name__, row.pk) for each in allowed}

    def get_row_or_404(self: Any, request: HttpRequest, object_id: str) -> Any:
        """Return a row.

        Raises:
            Http404: the row does not exist.
            PermissionDenied: the user may not view it.
        """
        row = self.get_object(request, unquote(str(object_id)))
        if row is None:
            raise Http404
        if not self.has_view_or_change_permission(request, row):
            raise PermissionDenied
        return row


class OpsAdmin(OpsPages, DraftableAdmin, ModelAdmin):  # type: ignore[misc]
    """Base class of back office pages."""

    form = OptimisticLockForm
    list_per_page = 50
    list_filter_submit = True
    warn_unsaved_form = True
    show_facets = admin.ShowFacets.NEVER
    formfield_overrides: ClassVar[Any] = {
        models.DurationField: {"form_class": DurationField, "widget": UnfoldAdminTextInputWidget},
        models.FloatField: {"form_class": NumberField, "widget": UnfoldAdminDecimalFieldWidget},
    }
    #: Of "add", "change" and "delete": what no user may do.
    forbidden: ClassVar[frozenset[str]] = frozenset()
    #: Fields hidden from users without the right to change.
    write_only: ClassVar[frozenset[str]] = frozenset({"change_reason"})
    #: Fields that a stored row keeps.
    fixed_fields: ClassVar[tuple[str, ...]] = ()

    def has_add_permission(self, request: HttpRequest) -> bool:
        return "add" not in self.forbidden and super().has_add_permission(request)

    def has_change_permission(self, request: HttpRequest, obj: Any = None) -> bool:
        return "change" not in self.forbidden and super().has_change_permission(request, obj)

    def has_delete_permission(self, request: HttpRequest, obj: Any = None) -> bool:
        return "delete" not in self.forbidden and super().has_delete_permission(request, obj)

    def get_changelist_instance(self, request: HttpRequest) -> Any:
        shown = super().get_changelist_instance(request)
        self.load_rows(shown.result_list)
        return shown

    def load_rows(self, rows: Iterable[Any]) -> None:
        """Read at once what the columns show of all rows of a page, and store it in them."""

    @ops_display(description="")
    def action_checkbox(self, row: models.Model) -> str:
        return format_html(
            '<input type="checkbox" name="{}" value="{}" class="action-select at-check" aria-label="{}">',
            ACTION_CHECKBOX_NAME, row.pk, gettext("Select record"),
        )  # fmt: skip

    def get_fieldsets(self, request: HttpRequest, obj: models.Model | None = None) -> Any:
        fieldsets = super().get_fieldsets(request, obj)
        if obj is None or self.has_change_permission(request, obj):
            return fieldsets
        return [(name, {**options, "fields": self._drop_write_only(options["fields"])}) for name, options in fieldsets]

    def _drop_write_only(self, fields: Any) -> list[Any]:
        return [
            tuple(self._drop_write_only(each)) if isinstance(each, (list, tuple)) else each
            for each in fields
            if isinstance(each, (list, tuple)) or each not in self.write_only
        ]

    def get_readonly_fields(self, request: HttpRequest, obj: Any = None) -> Any:
        return [*super().get_readonly_fields(request, obj), *(self.fixed_fields if obj else ())]

    def locked_fields(self, request: HttpRequest, obj: Any) -> Collection[str]:
        """Return the fields that an editor of this row sees disabled."""
        return ()

    def get_form(self, request: HttpRequest, obj: Any = None, change: bool = False, **kwargs: Any) -> Any:
        """Return the form of the row. Users without the right to change it get the same form, disabled.

        The fieldsets may name fields that the form adds when it is built, such as secrets.
        """
        if "fields" not in kwargs:
            kwargs["fields"] = flatten_fieldsets(self.get_fieldsets(request, obj))
        if kwargs["fields"] is not None:
            columns = {each.name for each in self.opts.get_fields()}
            kwargs["fields"] = [each for each in kwargs["fields"] if each in columns]
        views_only = obj is not None and not self.has_change_permission(request, obj)
        # Django builds an empty form for viewers of a stored row.
        form_class = super().get_form(request, obj, change and not views_only, **kwargs)
        locked = None if views_only else self.locked_fields(request, obj)
        return form_class if locked == () else lock_fields(form_class, locked)

    def render_change_form(self, request: HttpRequest, context: Any, *args: Any, **kwargs: Any) -> HttpResponse:
        row = context["original"]
        if row is not None:
            context["adminform"].readonly_fields = self.get_readonly_fields(request, row)
        return super().render_change_form(request, context, *args, **kwargs)  # type: ignore[no-any-return]


def lock_fields(form_class: type[forms.Form], names: Collection[str] | None) -> type[forms.Form]:
    """Return the form with these fields disabled; None disables all. Posted values of them are ignored."""

    class LockedForm(form_class):  # type: ignore[valid-type,misc]
        def __init__(self, *args: Any, initial: Any = None, **kwargs: Any) -> None:
            kept = {name: value for name, value in (initial or {}).items() if names is None or name not in names}
            super().__init__(*args, initial=kept, **kwargs)
            for name, field in self.fields.items():
                if names is None or name in names:
                    field.disabled = True
                    if isinstance(field, forms.ModelChoiceField):  # the only choice, also if new ones must not have it
                        rows = field.queryset.model._base_manager  # type: ignore[union-attr]
                        field.queryset = rows.filter(pk=self.initial.get(name))

    return LockedForm


class CheckedForm(OptimisticLockForm):
    """A form with a reason. The row's own rules check it, as they check configuration files."""

    def check(self, values: Mapping[str, Any], /) -> None:
        """Check the values together with other rows. Raises `InvalidInput`."""

    change_reason = forms.CharField(
        label=gettext_lazy("Reason for the change"),
        help_text=gettext_lazy("Stored in the history with your name."),
        required=False,
        max_length=100,
        widget=UnfoldAdminTextInputWidget,
    )

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        for field in self.fields.values():
            field.label = capfirst(field.label)

    def values(self) -> dict[str, Any]:
        return {name: value for name, value in self.cleaned_data.items() if name != "change_reason"}

    def clean(self) -> dict[str, Any]:
        cleaned = super().clean()
        values = self.values()
        try:
            self.check(values)
        except InvalidInput as error:
            for each in error.errors:
                self.add_row_error(each.field, each.message)
        return cleaned

    def save(self, commit: bool = True) -> Any:
        self.instance._change_reason = self.cleaned_data.get("change_reason") or None
        return super().save(commit)


@method_decorator(require_safe, name="history_view")
@method_decorator(require_safe, name="history_form_view")
class HistoryAdmin(RestorableAdmin, SimpleHistoryAdmin):  # type: ignore[misc]
    """Show every change with its author, reason and differences, and restore old versions.

    The pages accept GET and HEAD only. `simple_history` saves posted data to an old state and requires only the right
    to view.
    """

    #: Columns with values by name, of which the history shows the names: every viewer may read it.
    masked_in_history: ClassVar[frozenset[str]] = frozenset()

    def history_view(self, request: HttpRequest, object_id: str, extra_context: Any = None) -> HttpResponse:
        self._refuse_odd_ids(object_id)
        return super().history_view(request, object_id, extra_context)  # type: ignore[no-any-return]

    def history_form_view(
        self, request: HttpRequest, object_id: str, version_id: str, extra_context: Any = None
    ) -> HttpResponse:
        """Show an old state. All users see it as the row's page shows it to viewers."""
        self._refuse_odd_ids(object_id, version_id)
        version = get_object_or_404(self.model.history, **{self.opts.pk.attname: object_id, "history_id": version_id})
        link = self.restore_link(request, version)
        request.reads_version = True  # type: ignore[attr-defined]
        context = {"version": version, "restore_link": link, **(extra_context or {})}
        return super().history_form_view(request, object_id, version_id, context)  # type: ignore[no-any-return]

    def _refuse_odd_ids(self, object_id: str, version_id: str = "0") -> None:
        """Answer 404 to ids that no row can have. `simple_history` passes them to the database."""
        try:
            self.opts.pk.to_python(unquote(object_id))
            self.model.history.model._meta.pk.to_python(version_id)
        except ValidationError:
            raise Http404 from None

    def has_change_permission(self, request: HttpRequest, obj: Any = None) -> bool:
        return not hasattr(request, "reads_version") and super().has_change_permission(request, obj)

    def revert_disabled(self, request: HttpRequest, obj: Any = None) -> bool:
        """Disable the reverting of `simple_history`, which skips the checks of the row's form."""
        return True

    def set_history_delta_changes(self, request: HttpRequest, historical_records: Any, **kwargs: Any) -> None:
        super().set_history_delta_changes(request, historical_records, **kwargs)
        for record in historical_records:
            record.history_date = format_instant(record.history_date)
            record.history_change_reason = record.history_change_reason or "–"
            if record.history_user_id is None:
                record.history_user = get_user_model()(username=gettext("system or configuration file"))

    def get_historical_record_context_helper(self, request: HttpRequest, historical_record: Any) -> Any:
        return ReadableChanges(self.model, historical_record, self.masked_in_history)


class ReadableChanges(HistoricalRecordContextHelper):  # type: ignore[misc]
    """Format durations and lists as they are typed, not as Python prints them."""

    def __init__(self, model: type[models.Model], record: Any, masked: Collection[str]) -> None:
        super().__init__(model, record)
        self.masked = masked

    def prepare_delta_change_value(self, change: Any, value: Any) -> Any:
        if change.field in self.masked:
            return ", ".join(f"{name}={MASK}" for name in sorted(value)) or "–"
        if isinstance(value, timedelta):
            return format_duration(value)
        if isinstance(value, dict) and value.keys() & {"all", "any"}:
            return str(compile_condition(value))
        if isinstance(value, list):
            return ", ".join(map(_format_entry, value))
        return super().prepare_delta_change_value(change, value)

    def stringify_delta_change_values(self, change: Any, old: Any, new: Any) -> Any:
        """Keep the markup of instants whole: long texts are shortened."""
        if isinstance(change.old, datetime) or isinstance(change.new, datetime):
            return format_instant(change.old), format_instant(change.new)
        return super().stringify_delta_change_values(change, old, new)


def _format_entry(value: Any) -> str:
    """Format an entry of a list; content variants and send windows are mappings."""
    if isinstance(value, dict) and value.keys() >= {"key", "when", "template"}:
        return f"{value['key']}, {value['template']}: {compile_condition(value['when'])}"
    if isinstance(value, dict) and value.keys() >= {"days", "from", "to"}:
        return format_window(value)
    return str(value)


class SingleRowAdmin(OpsAdmin):
    """A page of the single row of a table. Its list redirects to it."""

    forbidden = frozenset({"delete"})

    def has_add_permission(self, request: HttpRequest) -> bool:
        return super().has_add_permission(request) and not self.model.objects.exists()

    def save_model(self, request: HttpRequest, obj: Any, form: Any, change: bool) -> None:
        obj.pk = 1
        super().save_model(request, obj, form, change)

    def changelist_view(self, request: HttpRequest, extra_context: Any = None) -> HttpResponse:
        row = self.model.objects.first()
        if row is not None and self.has_view_or_change_permission(request, row):
            return redirect(self.url("change", row.pk))
        page: HttpResponse = super().changelist_view(request, extra_context)
        return page


class ReadOnlyAdmin(OpsAdmin):
    """A page of rows that users cannot add, change or delete."""

    forbidden = frozenset({"add", "change", "delete"})

    def get_readonly_fields(self, request: HttpRequest, obj: Any = None) -> Any:
        """Return all fields: there is no form that editors have."""
        return self.fields or super().get_readonly_fields(request, obj)


class RowPage:
    """A page of its own for each row, instead of a form."""

    def show_row(self, request: HttpRequest, row: Any) -> HttpResponse:
        raise NotImplementedError

    def change_view(self: Any, request: HttpRequest, object_id: str, *args: Any, **kwargs: Any) -> HttpResponse:
        return self.show_row(request, self.get_row_or_404(request, object_id))  # type: ignore[no-any-return]


class BigTable:
    """A list of millions of rows. Rows are not counted; a full page links to the next one. A replica may serve it."""

    show_full_result_count = False
    paginator = InfinitePaginator

    def get_paginator(self: Any, request: HttpRequest, queryset: Any, *args: Any, **kwargs: Any) -> Paginator[Any]:
        """Count the entries of a row's history: they are few."""
        kind = self.paginator if queryset.model is self.model else Paginator
        return kind(queryset, *args, **kwargs)

    def changelist_view(self, request: HttpRequest, extra_context: Any = None) -> HttpResponse:
        view = super().changelist_view  # type: ignore[misc]
        return render_from_replica(request, lambda: view(request, extra_context))


# Retire rows instead of deleting them, so that their history stays readable.
#
# Long lists are counted only up to `MOST_COUNTED` rows.


class RetiredFilter(admin.SimpleListFilter):
    """Hide retired rows unless the user selects them."""

    title = gettext_lazy("retired")
    parameter_name = "retired"

    def lookups(self, request: HttpRequest, model_admin: Any) -> list[tuple[str, Any]]:
        return [("yes", gettext_lazy("Retired")), ("all", gettext_lazy("All"))]

    def choices(self, changelist: Any) -> Any:
        default, *others = super().choices(changelist)
        return [{**default, "display": gettext("In use")}, *others]

    def queryset(self, request: HttpRequest, queryset: Any) -> Any:
        if self.value() == "all":
            return queryset
        return queryset.filter(retired_at__isnull=self.value() != "yes")


MOST_NAMED = 5  #: objects that need a row


class Retirable(OpsAdmin):
    """Offer retirement. Only a row that was never used can be deleted."""

    actions_detail: ClassVar[tuple[str, ...]] = ("retire", "bring_back")
    list_filter: ClassVar[Any] = (RetiredFilter,)
    list_filter_submit = False  #: a list with filters that wait for a button sets it

    def in_use(self, row: Any) -> bool:
        """Return whether history refers to the row, so that it cannot be deleted."""
        raise NotImplementedError

    def explain_retirement_block(self, row: Any) -> str:
        """Return why the row cannot be retired now, or "": other objects in use need it."""
        found = list_users(row)
        users = ", ".join(f"{gettext(section.noun)} {user}" for section, user in found[:MOST_NAMED])
        if len(found) > MOST_NAMED:
            users += gettext(" (and %(count)s more)") % {"count": len(found) - MOST_NAMED}
        text = gettext("Still used by: %(users)s. Change or retire these first.")
        return text % {"users": users} if users else ""

    def explain_restoration_block(self, row: Any) -> str:
        """Return why the row cannot be restored now, or "": objects that it uses may have been retired since."""
        section = next(each for each in sections().values() if each.model is self.model)
        found = []
        for _place, model, key in section.list_references(row):
            found += [str(each) for each in model._default_manager.filter(key=key).exclude(retired_at=None)]
        text = gettext("It uses objects that are retired: %(names)s. Restore them first.")
        return text % {"names": ", ".join(dict.fromkeys(found))} if found else ""

    def describe_retirement_effects(self, row: Any) -> list[str]:
        """Return what the retirement changes for waiting work, for the confirmation page."""
        return []

    def has_delete_permission(self, request: HttpRequest, obj: Any = None) -> bool:
        return super().has_delete_permission(request, obj) and (obj is None or not self.in_use(obj))

    def get_actions(self, request: HttpRequest) -> Any:
        return {name: each for name, each in super().get_actions(request).items() if name != "delete_selected"}

    @ops_display(description=gettext_lazy("name"), ordering="key")
    def name_or_key(self, row: Any) -> str:
        return str(row)

    @ops_display(description=gettext_lazy("state"))
    def shown_state(self, row: Any) -> Any:
        return render_tag(gettext("Retired")) if row.retired_at else render_tag(gettext("In use"), "success")

    @row_action(gettext_lazy("Retire"), icon="archive", permission="change", allowed=lambda row: row.retired_at is None)
    def retire(self, request: HttpRequest, row: Any) -> Confirmation:
        return Confirmation(
            title=gettext("Retire “%(what)s”?") % {"what": row}, button=gettext("Retire"),
            text=gettext("Removes the object from the lists and stops its use. The history stays readable. "
                   "You can restore the object later."),
            facts=self.describe_retirement_effects(row), problem=self.explain_retirement_block(row),
            act=lambda: self._write(row, now()), logged=gettext("Retired."),
            done=gettext("“%(what)s” is retired.") % {"what": row},
        )  # fmt: skip

    @row_action(gettext_lazy("Restore"), icon="unarchive", permission="change", allowed=lambda row: row.retired_at)
    def bring_back(self, request: HttpRequest, row: Any) -> Confirmation:
        return Confirmation(
            title=gettext("Restore “%(what)s”?") % {"what": row}, button=gettext("Restore"),
            text=gettext("The object is used again at once."), problem=self.explain_restoration_block(row),
            act=lambda: self._write(row, None), logged=gettext("Restored."),
        )  # fmt: skip

    def _write(self, row: Any, retired_at: datetime | None) -> None:
        """Write to the current row, so that concurrent changes of other fields stay."""
        with transaction.atomic():
            stored = lock_for_write(self.model._default_manager.all()).get(pk=row.pk)
            stored.retired_at = retired_at
            stored.save()


MOST_COUNTED = 10_000  #: rows that are counted; beyond, only that there are more


class CappedPaginator(Paginator):  # type: ignore[type-arg]
    """Count at most `MOST` rows; later pages do not exist. A narrower filter finds the rest."""

    @cached_property
    def count(self) -> int:
        rows = cast("QuerySet[Any]", self.object_list)
        found = count_within(lambda: rows.order_by()[: MOST_COUNTED + 1].count())
        return MOST_COUNTED + 1 if found is None else found
