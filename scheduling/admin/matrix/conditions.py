"""Edit conditions and content variants of a node as rows of field, operator and value. Works without JavaScript."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Container, Iterable, Mapping
from string import ascii_uppercase
from typing import Any

from django import forms
from django.core.exceptions import ValidationError
from django.template.loader import render_to_string
from django.utils.safestring import SafeString
from django.utils.translation import gettext as _
from django.utils.translation import gettext_lazy
from unfold.widgets import UnfoldAdminSelectWidget, UnfoldAdminTextInputWidget

from scheduling.admin.form_fields import write_number
from scheduling.admin.labels import translate_error
from scheduling.errors import ErrorCollector
from scheduling.models import Template
from scheduling.policy.node_conditions import MOST_ROWS, MOST_VARIANTS, WITH_LIST, check_condition
from scheduling.strict_text import InvalidText, read_json

BLANK_ROWS = 3
GROUPS = ascii_uppercase[:MOST_ROWS]  #: a condition may have a group for each row
JOIN_LABELS = {"all": gettext_lazy("All rows must hold"), "any": gettext_lazy("Any row must hold")}
OPERATOR_LABELS = {
    "eq": gettext_lazy("is"), "ne": gettext_lazy("is not"), "gt": gettext_lazy("is more than"),
    "gte": gettext_lazy("is at least"), "lt": gettext_lazy("is less than"), "lte": gettext_lazy("is at most"),
    "in": gettext_lazy("is one of"), "not_in": gettext_lazy("is none of"), "contains": gettext_lazy("contains"),
    "not_contains": gettext_lazy("does not contain"), "starts_with": gettext_lazy("starts with"),
    "exists": gettext_lazy("exists"), "absent": gettext_lazy("is missing"),
}  # fmt: skip
_ENTRY = re.compile(r'\s*("(?:[^"\\]|\\.)*"|[^,，;；\n]+)\s*')
_TRUTH = {"true": True, "false": False, "是": True, "否": False}
OTHER_JOIN = {"all": "any", "any": "all"}


def format_value(value: Any) -> str:
    """Return a value as it is typed. Quotes keep a text that looks like a number, or that holds a comma."""
    if isinstance(value, list):
        return ", ".join(format_value(each) for each in value)
    if value is None:
        return ""
    if isinstance(value, bool):
        return "true" if value else "false"
    if not isinstance(value, str):
        return write_number(value)
    plain = parse_value(value) == value and not re.search(r'[,，;；\n"]', value)
    return value if plain and value == value.strip() else json.dumps(value, ensure_ascii=False)


def parse_value(text: str) -> Any:
    """Return the typed value of a text: true, false, a number or a quoted text as in JSON, or the text itself.

    With an exponent it is a number only as `format_value` writes one: 1e5 is more likely a code.
    """
    text = text.strip()
    if text.lower() in _TRUTH:
        return _TRUTH[text.lower()]
    try:
        value = read_json(text)
    except InvalidText:
        return text
    if isinstance(value, float) and "e" in text.lower() and text != write_number(value):
        return text
    return value if isinstance(value, (str, int, float)) else text


def _spread_rows(stored: Mapping[str, Any] | None) -> dict[str, Any]:
    """Return a stored condition as the form shows it: flat rows, those of a group with one letter."""
    if not stored:
        return {"join": "all", "rows": []}
    ((join, parts),) = stored.items()
    rows, letters = [], iter(GROUPS)
    for part in parts:
        group = "" if "field" in part or join in part else next(letters)
        inner = [part] if "field" in part else next(iter(part.values()))
        rows += [
            {"field": row["field"], "op": row["op"], "value": format_value(row.get("value")), "group": group}
            for row in inner
        ]
    return {"join": join, "rows": rows}


class RowsWidget(forms.Widget):
    """Several inputs, each with a label of its own. No input in the data means that there are no rows."""

    def __init__(self) -> None:
        super().__init__()
        self.suggest: Callable[[], Iterable[str]] = tuple

    def value_omitted_from_data(self, data: Any, files: Any, name: str) -> bool:
        return False

    def id_for_label(self, id_: str) -> str:
        return ""


class ConditionWidget(RowsWidget):
    """Rows of inputs. Three blank rows follow; a row without a field and a value is dropped."""

    def render(self, name: str, value: Any, attrs: Any = None, renderer: Any = None) -> SafeString:
        shown = value if isinstance(value, Mapping) and "rows" in value else _spread_rows(value)
        locked = "disabled" in (attrs or {})
        rows = [*shown["rows"], *({} for _blank in range(0 if locked else BLANK_ROWS))][:MOST_ROWS]
        known = f"known_{name}"
        groups = {"": "–", **{letter: letter for letter in GROUPS}}
        return render_to_string(
            "ops/condition_rows.html",
            {
                "join": _select(f"{name}-join", JOIN_LABELS, shown["join"], _("how the rows are joined")),
                "rows": [
                    {
                        "field": _input(f"{name}-{place}-field", row.get("field", ""), _("field"), list=known),
                        "op": _select(f"{name}-{place}-op", OPERATOR_LABELS, row.get("op", "eq"), _("operator")),
                        "value": _input(f"{name}-{place}-value", row.get("value", ""), _("value")),
                        "group": _select(f"{name}-{place}-group", groups, row.get("group", ""), _("group")),
                    }
                    for place, row in enumerate(rows)
                ],
                "known": known,
                "suggestions": () if locked else self.suggest(),
                "locked": locked,
            },
        )

    def value_from_datadict(self, data: Any, files: Any, name: str) -> Any:
        rows = [
            {part: data.get(f"{name}-{place}-{part}", "").strip() for part in ("field", "op", "value", "group")}
            for place in range(MOST_ROWS + BLANK_ROWS)
            if f"{name}-{place}-op" in data
        ]
        return {"join": data.get(f"{name}-join", "all"), "rows": [row for row in rows if row["field"] or row["value"]]}


def _select(name: str, labels: Mapping[str, Any], value: str, label: str) -> SafeString:
    widget = UnfoldAdminSelectWidget(choices=list(labels.items()), attrs={"aria-label": label})
    return widget.render(name, value)  # type: ignore[no-any-return]


def _input(name: str, value: str, label: str, **attrs: str) -> SafeString:
    shown = {"aria-label": label, "placeholder": label, "autocomplete": "off", **attrs}
    return UnfoldAdminTextInputWidget(attrs=shown).render(name, value)  # type: ignore[no-any-return]


class ConditionField(forms.Field):
    """A condition. Errors name the row as the form shows it."""

    widget = ConditionWidget

    def clean(self, value: Any) -> dict[str, Any] | None:
        return read_rows(value)

    def has_changed(self, initial: Any, data: Any) -> bool:
        return bool(_spread_rows(initial)["rows"] != (data or {}).get("rows", [])) or bool(
            initial and next(iter(initial)) != data.get("join")
        )


def read_rows(shown: Any) -> dict[str, Any] | None:
    """Return the stored form of the rows of a form; None if there are none.

    Raises:
        ValidationError: with each error and its row.
    """
    rows = shown["rows"] if shown else []
    if not rows:
        return None
    join = shown["join"] if shown["join"] in OTHER_JOIN else "all"
    parts: list[Any] = []
    groups: dict[str, list[Any]] = {}
    numbers: dict[int, int] = {}  #: by identity of a stored row: its number in the form
    for number, row in enumerate(rows, 1):
        stored: dict[str, Any] = {"field": row["field"], "op": row["op"]}
        if row["op"] in WITH_LIST:
            stored["value"] = [parse_value(each) for each in _ENTRY.findall(row["value"])]
        elif row["value"]:
            stored["value"] = parse_value(row["value"])
        numbers[id(stored)] = number
        letter = row["group"] if row["group"] in GROUPS else ""
        if letter and letter not in groups:
            groups[letter] = []
            parts.append({OTHER_JOIN[join]: groups[letter]})
        (groups[letter] if letter else parts).append(stored)
    condition = {join: parts}
    found = ErrorCollector()
    check_condition(condition, found, "")
    if found.errors:
        raise ValidationError([_describe_error(each.field, each.message, condition, numbers) for each in found.errors])
    return condition


def _describe_error(path: str, message: str, condition: Any, numbers: Mapping[int, int]) -> str:
    found = condition
    for name, place in re.findall(r"(all|any)\[(\d+)\]", path):
        found = found[name][int(place)]
    number, words = numbers.get(id(found)), translate_error(message)
    return _("Row %(number)s: %(error)s") % {"number": number, "error": words} if number else words


class VariantsWidget(RowsWidget):
    """A key, a template and a condition for each variant, with one blank one below."""

    def render(self, name: str, value: Any, attrs: Any = None, renderer: Any = None) -> SafeString:
        locked = "disabled" in (attrs or {})
        given = [*(value or []), *([{}] if not locked and len(value or []) < MOST_VARIANTS else [])]
        rows = ConditionWidget()
        rows.suggest = self.suggest
        templates = () if locked else Template.objects.filter(retired_at=None).values_list("key", flat=True)
        listed = {"": "–", **{key: key for key in templates}}
        variants = []
        for place, each in enumerate(given):
            prefix, template = f"{name}-{place}", each.get("template", "")
            choices = {**listed, template: template or "–"}
            variants.append({
                "key": _input(f"{prefix}-key", each.get("key", ""), _("key")),
                "template": _select(f"{prefix}-template", choices, template, _("template")),
                "rows": rows.render(prefix, each.get("when"), attrs), "blank": not each,
            })  # fmt: skip
        return render_to_string("ops/variant_rows.html", {"variants": variants, "locked": locked})

    def value_from_datadict(self, data: Any, files: Any, name: str) -> Any:
        given = [
            {
                "key": data.get(f"{name}-{place}-key", "").strip(),
                "template": data.get(f"{name}-{place}-template", ""),
                "when": ConditionWidget().value_from_datadict(data, files, f"{name}-{place}"),
            }
            for place in range(MOST_VARIANTS)
            if f"{name}-{place}-template" in data
        ]
        return [each for each in given if each["key"] or each["template"] or each["when"]["rows"]]


class VariantsField(forms.Field):
    """Content variants. One without a key, a template and rows is dropped."""

    widget = VariantsWidget
    kept: Container[tuple[str, str]] = ()  #: key and template of the stored variants; they may be retired since

    def clean(self, value: Any) -> list[dict[str, Any]]:
        stored, errors = [], []
        templates = set(Template.objects.filter(retired_at=None).values_list("key", flat=True)) if value else set()
        for number, each in enumerate(value or [], 1):
            try:
                condition = read_rows(each["when"])
                if condition is None or not each["template"] or not each["key"]:
                    raise ValidationError(_("needs a key, a template and at least one row; clear all to remove it"))
                if each["template"] not in templates and (each["key"], each["template"]) not in self.kept:
                    named = {"noun": _("template"), "name": each["template"]}
                    raise ValidationError(_("there is no %(noun)s “%(name)s”") % named)
                stored.append({"key": each["key"], "when": condition, "template": each["template"]})
            except ValidationError as error:
                words = "; ".join(error.messages)
                errors.append(_("Variant %(number)s: %(error)s") % {"number": number, "error": words})
        if errors:
            raise ValidationError(errors)
        return stored

    def has_changed(self, initial: Any, data: Any) -> bool:
        shown = [{**each, "when": _spread_rows(each["when"])} for each in initial or []]
        return bool(shown != (data or []))
