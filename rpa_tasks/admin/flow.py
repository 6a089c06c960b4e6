"""Admin pages of flows: form fields for commands, exit codes and JSON, and the list."""

from __future__ import annotations

import json
import shlex
from collections.abc import Collection, Iterable
from typing import Any, ClassVar

from django import forms
from django.contrib import admin, messages
from django.core.exceptions import ValidationError
from django.http import HttpRequest
from django.utils.html import format_html
from django.utils.translation import gettext
from django.utils.translation import gettext_lazy as _
from unfold.contrib.filters.admin import RelatedDropdownFilter
from unfold.widgets import UnfoldAdminSelectWidget, UnfoldAdminTextareaWidget, UnfoldAdminTextInputWidget

from rpa_tasks.admin.labels import OfPlatform
from rpa_tasks.models import Flow
from rpa_tasks.supervisor.command import check_program
from scheduling.admin.base import CheckedForm, HistoryAdmin, Retirable, RetiredFilter, ops_display
from scheduling.admin.form_fields import (
    DataField,
    DurationField,
    DurationsField,
    NamesField,
    TextLikeField,
    split_pairs,
)
from scheduling.admin.labels import translate_error
from scheduling.strict_text import FIELD_SIZE, InvalidText, read_json


def make_code_widget(rows: int) -> UnfoldAdminTextareaWidget:
    return UnfoldAdminTextareaWidget(attrs={"rows": rows, "class": "at-mono", "spellcheck": "false"})


class CommandField(TextLikeField):
    """The words of a command, one per line: no quotes, no shell. JSON for a word that a line cannot hold."""

    widget = make_code_widget(11)

    def write(self, value: Iterable[str]) -> str:
        return "\n".join(_as_line(str(word)) for word in value)

    def to_python(self, value: Any) -> Any:
        lines = _split_lines(super().to_python(value) or "")
        return [_as_word(line.strip()) for line in lines if line.strip()]


def _split_lines(text: str) -> list[str]:
    """Split at the line ends of a browser alone: a value may have U+2028."""
    return text.replace("\r\n", "\n").split("\n")


def _as_line(word: str) -> str:
    fits = word and word == word.strip() and not {"\r", "\n"} & set(word) and not word.startswith('"')
    return word if fits else json.dumps(word, ensure_ascii=False)


def _as_word(line: str) -> str:
    if line.startswith('"'):
        try:
            word = read_json(line)
        except InvalidText:
            word = None
        if isinstance(word, str):
            return word
        raise ValidationError(
            gettext("“%(line)s” starts with a quotation mark but is not a JSON text") % {"line": line}
        )
    return line


class ExitCodesField(TextLikeField):
    """Exit codes as text: `business=65 66, session=77`."""

    widget = UnfoldAdminTextInputWidget

    def write(self, value: dict[str, list[int]]) -> str:
        return ", ".join(f"{name}={' '.join(map(str, codes))}" for name, codes in value.items())

    def to_python(self, value: Any) -> Any:
        found: dict[str, list[int]] = {}
        for name, codes in split_pairs(super().to_python(value) or ""):
            try:
                found[name] = [int(each) for each in codes.split()]
            except ValueError:
                raise ValidationError(
                    gettext("“%(given)s” must be numbers with spaces between them") % {"given": codes}
                ) from None
        return found


class VariablesField(TextLikeField):
    """Variables with their values, `NAME=value`, one a line. JSON for a value that a line cannot hold.

    Spaces around name and value are dropped.
    """

    widget = make_code_widget(3)

    def write(self, value: dict[str, str]) -> str:
        return "\n".join(f"{name}={_as_line(text) if text else ''}" for name, text in sorted(value.items()))

    def to_python(self, value: Any) -> Any:
        lines = [line.strip() for line in _split_lines(super().to_python(value) or "") if line.strip()]
        if wrong := [line for line in lines if "=" not in line]:
            raise ValidationError(gettext("“%(given)s” must look like NAME=value") % {"given": wrong[0][:100]})
        found: dict[str, str] = {}
        for line in lines:
            name, text = map(str.strip, line.split("=", 1))
            if name in found:
                raise ValidationError(gettext("“%(name)s” is there twice") % {"name": name})
            found[name] = _as_word(text)
        return found


class JsonField(DataField):
    """A JSON object of a row."""

    most = 4 * FIELD_SIZE  # payloads and schemas have lower limits

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**{"widget": make_code_widget(5), **kwargs})


USUAL_COMMAND = [
    "{python}", "-m", "rpa_tasks.flow_sdk", "run", "--flow", "{flow}", "--param", "{param}", "--timeout", "{timeout}"
]  # fmt: skip
EXAMPLE = {"param": '{"debug_port": 9222, "shop_id": "…", "profile_id": "…", "task_id": "…", …}'}
#: A person chooses: the wrong answer repeats an effect or leaves each killed run to an operator.
IDEMPOTENT_CHOICES = [
    ("", _("Please choose")), ("True", _("Yes: a repeat has no second effect")),
    ("False", _("No: a repeat may do it twice")),
]  # fmt: skip


class FlowForm(CheckedForm):
    command = CommandField(
        label=_("command"),
        help_text=_(
            "One word a line; nothing is quoted and no shell reads it. Filled in: {flow} = platform_task-type, "
            "{param} = the JSON parameter, {param_file} = a file that holds it, {timeout} = seconds, {python} = this "
            "system's own Python, {shop_id}, {platform}, {profile_id}, {debug_port}, {task_id}."
        ),
    )
    timeout = DurationField(
        label=_("timeout"),
        help_text=_("Maximum run time, for example 10m. The command then gets a stop signal and is killed 50 s later."),
    )
    exit_codes = ExitCodesField(
        label=_("exit codes"),
        required=False,
        help_text=_(
            "transient: retried; business: needs a manual decision; session: the shop needs a login; "
            "platform: the platform blocks the run. They add to the defaults business=64 65, session=77, platform=75. "
            "All other errors count as transient."
        ),
    )
    idempotent = forms.TypedChoiceField(
        label=_("idempotent"),
        choices=IDEMPOTENT_CHOICES,
        coerce=lambda chosen: chosen == "True",
        widget=UnfoldAdminSelectWidget,
        help_text=_(
            "May a run be repeated although it may have had its effect? It concerns runs that were killed, timed out "
            "or whose worker was lost. Yes: they are tried again. No: an operator decides about each. A command that "
            "ends with an error is tried again in both cases."
        ),
    )
    retry_delays = DurationsField(
        label=_("retries after"), required=False,
        help_text=_("When a transient failure is tried again, like 30s, 1m, 2m. Empty: never."),
    )  # fmt: skip
    dedupe_window = DurationField(
        label=_("runs once within"), required=False,
        help_text=_("Like 24h: from the start of a job on, requests of the same shop and kind start no other one. Also "
                    "after it has succeeded. Empty: requests merge only while a job waits."),
    )  # fmt: skip
    payload_schema = JsonField(
        label=_("schema of the payload"), help_text=_("A JSON schema that every payload must fit. Empty: anything.")
    )
    environment = NamesField(
        label=_("environment variables"),
        help_text=_(
            "Names of variables passed to the command, for example DATABASE_URL; one per line. No others are passed."
        ),
    )

    env = VariablesField(
        label=_("fixed variables"),
        required=False,
        help_text=_("NAME=value, one a line. Every editor can read the values: pass secrets by their names above."),
    )
    path = NamesField(
        label=_("program folders"),
        help_text=_("Absolute folders that come first in the command's PATH; one a line."),
    )

    class Meta:
        model = Flow
        exclude = ("version", "retired_at")
        help_texts: ClassVar[Any] = {
            "task_type": _("Like sync_order: what publishers ask for."),
            "param_style": _("Where the command finds the payload in its JSON."),
            "needs_browser": _("The shop's own browser is started or kept for it."),
            "needs_result": _("Exit code 0 without a line {“result”: …} is a failure."),
            "dedupe_by": _("Which requests without a dedupe_key are of the same kind and merge into one waiting job."),
            "dedupe_period": _("Instead of a time span: once in each of them by the clock, also after success. Jobs "
                               "that start in different ones never merge."),
            "dedupe_timezone": _("Whose clock decides, like Asia/Shanghai. Empty: that of the product."),
            "dedupe_rerun": _("Whether a request in this time may start another job."),
            "cwd": _("An absolute folder where the command starts. Empty: a new empty one for each run."),
            "clear_cookies": _("Clears the login of the shop's browser before each run."),
        }  # fmt: skip

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if self.instance.pk is None:
            self.fields["command"].initial = USUAL_COMMAND
            self.initial.pop("idempotent", None)


#: Fields that decide which command runs on a node and how its end is judged.
COMMAND_FIELDS = ("command", "path", "cwd", "environment", "exit_codes")


def may_define_commands(request: HttpRequest) -> bool:
    return bool(request.user.has_perm("rpa_tasks.define_command"))


def shell_command(row: Flow) -> str:
    """Return the command as typed in a shell."""
    values = {**EXAMPLE, "flow": row.name, "timeout": str(int(row.timeout.total_seconds())), "python": "python"}
    words = []
    for word in row.command:
        for name, value in values.items():
            word = word.replace(f"{{{name}}}", value)
        words.append(shlex.quote(word))
    return " ".join(words)


@admin.register(Flow)
class FlowAdmin(OfPlatform, HistoryAdmin, Retirable):
    form = FlowForm
    list_display = ("task_type", "platform", "program", "timeout", "needs_browser", "idempotent", "shown_state")
    list_filter = (("platform", RelatedDropdownFilter), RetiredFilter)
    list_filter_submit = True
    list_select_related = ("platform",)
    search_fields = ("task_type", "platform__key")
    readonly_fields = ("as_typed", "env_names", "version")
    fixed_fields = ("platform", "task_type")
    masked_in_history = frozenset({"env"})

    def layout(self, request: HttpRequest, obj: Any) -> list[Any]:
        words = ("command",) if obj is None else ("command", "as_typed")
        env = "env" if obj is None or self._may_read_values(request, obj) else "env_names"
        return [
            (None, {"fields": (("platform", "task_type"), *words, "timeout", "path", "cwd", "environment", env)}),
            (_("Evaluation of the exit"), {"fields": ("idempotent", "exit_codes", "retry_delays", "needs_result")}),
            (_("Browser"), {"fields": (("needs_browser", "clear_cookies"),)}),
            (_("Payload"), {"fields": ("param_style", "payload_schema")}),
            (
                _("Repeated requests"),
                {"fields": ("dedupe_by", ("dedupe_window", "dedupe_period", "dedupe_timezone"), "dedupe_rerun")},
            ),
            (_("Life"), {"fields": ("change_reason",) if obj is None else ("version", "change_reason")}),
        ]

    def get_readonly_fields(self, request: HttpRequest, obj: Any = None) -> Any:
        fields = super().get_readonly_fields(request, obj)
        return fields if obj is None or self._may_read_values(request, obj) else [*fields, "env"]

    def locked_fields(self, request: HttpRequest, obj: Any) -> Collection[str]:
        return () if may_define_commands(request) else COMMAND_FIELDS

    def _may_read_values(self, request: HttpRequest, row: Flow) -> bool:
        """Return whether the user may read the values of the fixed variables; others see the names."""
        return may_define_commands(request) and self.has_change_permission(request, row)

    def has_add_permission(self, request: HttpRequest) -> bool:
        """Allow adding only with the permission for commands: a flow needs a command."""
        return may_define_commands(request) and super().has_add_permission(request)

    def save_model(self, request: HttpRequest, obj: Any, form: Any, change: Any) -> None:
        super().save_model(request, obj, form, change)
        if problem := check_program(obj.command[0], obj.path, obj.cwd):
            words = gettext(
                "Saved. On this machine the command cannot be started: %(problem)s. Execution nodes need it."
            )
            messages.warning(request, words % {"problem": translate_error(problem)})

    def in_use(self, row: Flow) -> bool:
        return row.jobs.exists()

    @ops_display(description=_("command line"))
    def as_typed(self, row: Flow) -> str:
        return format_html('<code class="at-code at-typed">{}</code>', shell_command(row)) if row.pk else "–"

    @ops_display(description=_("fixed variables"))
    def env_names(self, row: Flow) -> str:
        return ", ".join(sorted(row.env)) or "–"

    @ops_display(description=_("program"))
    def program(self, row: Flow) -> str:
        words = row.command if isinstance(row.command, list) else [json.dumps(row.command)]
        return format_html('<span class="at-mono">{}</span>', " ".join(map(str, words[:4])))
