"""Form fields for text formats: durations, `name=value` lists, names, JSON and YAML; and for secrets."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping
from datetime import timedelta
from typing import Any, ClassVar

from django import forms
from django.core.exceptions import ValidationError
from django.core.validators import ProhibitNullCharactersValidator
from django.utils.html import format_html, format_html_join
from django.utils.safestring import SafeString
from django.utils.text import capfirst
from django.utils.translation import gettext as _
from django.utils.translation import gettext_lazy, gettext_noop
from unfold.widgets import UnfoldAdminPasswordWidget, UnfoldAdminTextareaWidget, UnfoldAdminTextInputWidget

from scheduling.admin.labels import translate_error
from scheduling.durations import format_duration, from_seconds, parse_duration, to_seconds
from scheduling.error_text import ErrorText
from scheduling.models import EventType
from scheduling.models.encrypted import Sealed
from scheduling.policy.send_times import format_window, parse_window_line
from scheduling.strict_text import FIELD_SIZE, InvalidText, read_json, read_yaml, write_yaml

MASK = "••••"  #: in place of a value that may not be read
DURATION_HELP = gettext_lazy("Like 30s, 15m, 2h, 7d or 1h30m.")


def parse_duration_input(text: str) -> timedelta:
    """Parse a duration like `1h30m`.

    Raises:
        ValidationError: with a translated message.
    """
    try:
        return parse_duration(text.strip())
    except ValueError as error:
        raise ValidationError(translate_error(str(error))) from None


class TextLikeField(forms.CharField):
    """A value with a text format of its own."""

    widget = UnfoldAdminTextInputWidget
    rows: ClassVar[int] = 0  #: of a text area, for a field that may be empty

    def __init__(self, **kwargs: Any) -> None:
        if self.rows:
            kwargs = {"required": False, "widget": UnfoldAdminTextareaWidget(attrs={"rows": self.rows}), **kwargs}
        super().__init__(**kwargs)

    def write(self, value: Any) -> str:
        raise NotImplementedError

    def prepare_value(self, value: Any) -> Any:
        return value if value is None or isinstance(value, str) else self.write(value)

    def to_python(self, value: Any) -> Any:
        """Return the text, from which a format reads its value. Django's own check of NUL sees that value only."""
        text = super().to_python(value)
        ProhibitNullCharactersValidator()(text)
        return text

    def clean(self, value: Any) -> Any:
        """Return the stored value of a disabled field, which Django passes here instead of a text."""
        return value if self.disabled else super().clean(value)

    def has_changed(self, initial: Any, data: Any) -> bool:
        return not self.disabled and bool((self.prepare_value(initial) or "") != (data or "").strip())


class DurationField(TextLikeField):
    def __init__(self, **kwargs: Any) -> None:
        kwargs["help_text"] = kwargs.get("help_text") or DURATION_HELP
        kwargs.pop("max_length", None)
        super().__init__(**kwargs)

    def write(self, value: timedelta) -> str:
        return format_duration(value)

    def to_python(self, value: Any) -> Any:
        if isinstance(value, timedelta):
            return value
        text = super().to_python(value)
        return parse_duration_input(text) if text else None


def write_number(value: float) -> str:
    """Write a number with all its digits: 100 instead of 100.0."""
    return str(value).removesuffix(".0")


class NumberField(forms.FloatField):
    def prepare_value(self, value: Any) -> Any:
        return write_number(value) if isinstance(value, float) else value


def split_entries(text: str) -> list[str]:
    """Split a text at commas, semicolons (full width too) or line ends."""
    return [part.strip() for part in re.split(r"[,，;；\n]", text or "") if part.strip()]


class NamesField(TextLikeField):
    """A list of texts, one a line or separated by commas."""

    rows = 3

    def write(self, value: Iterable[str]) -> str:
        return "\n".join(value)

    def to_python(self, value: Any) -> Any:
        return list(dict.fromkeys(split_entries(super().to_python(value) or "")))


class WindowsField(TextLikeField):
    """Send windows, one a line. A line `always` stores an empty list; with `blank_is_default` blank is None."""

    rows = 3

    def __init__(self, *, blank_is_default: bool, **kwargs: Any) -> None:
        self.blank_is_default = blank_is_default
        super().__init__(**kwargs)

    def write(self, value: Iterable[Mapping[str, Any]]) -> str:
        return "\n".join(map(format_window, value)) or (_("always") if self.blank_is_default else "")

    def to_python(self, value: Any) -> Any:
        lines = [line.strip() for line in re.split(r"[;；\n]", super().to_python(value) or "") if line.strip()]
        if not lines:
            return None if self.blank_is_default else []
        if self.blank_is_default and [line.lower() for line in lines] in ([_("always").lower()], ["always"]):
            return []
        windows, errors = [], []
        for line in lines:
            try:
                windows.append(parse_window_line(line))
            except ValueError as error:
                named = ErrorText(gettext_noop("“%(given)s” %(problem)s"), given=line[:100], problem=str(error))
                errors.append(translate_error(named))
        if errors:
            raise ValidationError(errors)
        return windows


class DurationsField(TextLikeField):
    """A list of durations, stored in seconds: `10s, 1m, 5m`."""

    def write(self, value: Iterable[float]) -> str:
        return ", ".join(format_duration(from_seconds(each)) for each in value)

    def to_python(self, value: Any) -> Any:
        return [to_seconds(parse_duration_input(each)) for each in split_entries(super().to_python(value) or "")]


class LevelsField(TextLikeField):
    """Durations by level, stored in seconds: `vip=1h, normal=2h`."""

    def write(self, value: dict[str, float]) -> str:
        return ", ".join(f"{level}={format_duration(from_seconds(each))}" for level, each in value.items())

    def to_python(self, value: Any) -> Any:
        return {
            name: to_seconds(parse_duration_input(span)) for name, span in split_pairs(super().to_python(value) or "")
        }


class LimitsField(TextLikeField):
    """Whole numbers by level: `vip=5, normal=2`."""

    def write(self, value: dict[str, int]) -> str:
        return ", ".join(f"{level}={limit}" for level, limit in value.items())

    def to_python(self, value: Any) -> Any:
        pairs = split_pairs(super().to_python(value) or "")
        wrong = [limit for _level, limit in pairs if not limit.isdecimal() or len(limit) > 9]
        if wrong:
            raise ValidationError([_("“%(given)s” is not a whole number") % {"given": each} for each in wrong])
        return {level: int(limit) for level, limit in pairs}


def split_pairs(text: str) -> list[tuple[str, str]]:
    """Split `name=value` entries, in order.

    Raises:
        ValidationError: an entry is malformed or a name occurs twice.
    """
    found = []
    for part in split_entries(text):
        name, sign, value = part.replace("＝", "=").partition("=")
        if not sign or not name.strip() or not value.strip():
            raise ValidationError(_("“%(part)s” must look like name=value") % {"part": part})
        found.append((name.strip(), value.strip()))
    seen: set[str] = set()
    for name, _value in found:
        if name in seen:
            raise ValidationError(_("“%(name)s” is there twice") % {"name": name})
        seen.add(name)
    return found


class DelayRulesField(TextLikeField):
    """A node's own dynamic delay: `vip=1h, normal=2h, default=24h, active_within=24h, factor=0.6`."""

    def write(self, value: dict[str, Any]) -> str:
        spans = dict(value.get("by_level", {}))
        spans |= {name: value[name] for name in ("default", "active_within") if name in value}
        parts = [f"{name}={format_duration(from_seconds(each))}" for name, each in spans.items()]
        return ", ".join(
            parts + ([f"factor={write_number(value['active_factor'])}"] if "active_factor" in value else [])
        )

    def to_python(self, value: Any) -> Any:
        given = dict(split_pairs(super().to_python(value) or ""))
        if not given:
            return None
        if "default" not in given:
            raise ValidationError(_("“default=…” is missing: the delay of every other level"))
        rules: dict[str, Any] = {"default": to_seconds(parse_duration_input(given.pop("default")))}
        if "active_within" in given:
            rules["active_within"] = to_seconds(parse_duration_input(given.pop("active_within")))
        if "factor" in given:
            factor = given.pop("factor")
            try:
                rules["active_factor"] = float(factor)
            except ValueError:
                raise ValidationError(_("“factor=%(given)s” is not a number") % {"given": factor}) from None
        rules["by_level"] = {level: to_seconds(parse_duration_input(span)) for level, span in given.items()}
        return rules


class DataField(TextLikeField):
    """A JSON object in any layout, as in an event. An empty text means an empty object."""

    rows = 4
    most: ClassVar[int] = FIELD_SIZE  #: characters

    def __init__(self, **kwargs: Any) -> None:
        widget = UnfoldAdminTextareaWidget(attrs={"rows": self.rows, "placeholder": '{"order_no": "A1"}'})
        super().__init__(**{"widget": widget, **kwargs})

    def write(self, value: Any) -> str:
        return json.dumps(value, ensure_ascii=False, indent=2) if value else ""

    def has_changed(self, initial: Any, data: Any) -> bool:
        try:
            return not self.disabled and bool(self.to_python(data) != self.to_python(self.prepare_value(initial)))
        except ValidationError:
            return True

    def to_python(self, value: Any) -> Any:
        text = (super().to_python(value) or "").strip()
        try:
            data = read_json(text, most=self.most) if text else {}
        except InvalidText as error:
            raise ValidationError(_("This is not JSON: %(error)s") % {"error": translate_error(str(error))}) from None
        if not isinstance(data, dict):
            raise ValidationError(_("Must be a JSON object, like {“order_no”: “A1”}."))
        return data


class SettingsField(TextLikeField):
    """A mapping as YAML, one `name: value` a line."""

    rows = 4

    def write(self, value: dict[str, Any]) -> str:
        return write_yaml(value, sort_keys=True).strip() if value else ""

    def to_python(self, value: Any) -> Any:
        try:
            read = read_yaml(super().to_python(value) or "", most=FIELD_SIZE) or {}
        except InvalidText as error:
            raise ValidationError([_("Write one “name: value” a line."), translate_error(str(error))]) from None
        if not isinstance(read, dict):
            raise ValidationError(_("Write one “name: value” a line."))
        return read


class SuggestingInput(UnfoldAdminTextInputWidget):  # type: ignore[misc]
    """A text input that suggests known values and accepts any."""

    def __init__(self, suggest: Callable[[], Iterable[tuple[str, str]]], **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.suggest = suggest

    def render(self, name: str, value: Any, attrs: dict[str, Any] | None = None, renderer: Any = None) -> SafeString:
        listed = f"known_{name}"
        control = super().render(name, value, {**(attrs or {}), "list": listed, "autocomplete": "off"}, renderer)
        known = () if (attrs or {}).get("disabled") else self.suggest()
        options = format_html_join("", '<option value="{}">{}</option>', known)
        return format_html('{}<datalist id="{}">{}</datalist>', control, listed, options)


def list_event_types() -> list[tuple[str, str]]:
    return [(row.key, row.name) for row in EventType.objects.all()[:500]]


def make_event_type_input() -> SuggestingInput:
    return SuggestingInput(list_event_types)


SECRET_LABELS = {
    "url": gettext_lazy("address (URL)"), "secret": gettext_lazy("secret"), "address": gettext_lazy("address"),
    "callback_token": gettext_lazy("callback token"), "callback_key": gettext_lazy("callback encryption key"),
    "proxy": gettext_lazy("proxy"),
}  # fmt: skip
SECRET_HELP = gettext_lazy("Not shown after saving. Empty: no change. A single “-” removes the value.")
PROXY_HELP = gettext_lazy(
    "Like http://user:password@proxy.example:3128, or “direct” for none. Not set: the proxy of the installation. "
    "Not shown after saving. Empty: no change. A single “-” removes the value."
)
#: For users who may write new secrets.
SEALED = gettext_lazy(
    "Stored secrets cannot be decrypted on this server (encryption key missing). Empty: no change. A "
    "new value replaces all of them."
)


def get_readable_secrets(stored: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the stored secrets; empty if this server cannot decrypt them."""
    return {} if isinstance(stored, Sealed) else stored


class SecretField(forms.CharField):
    """A secret that is written and never displayed. Empty keeps the stored value, "-" removes it."""

    def __init__(self, name: str, stored: bool) -> None:
        known = _("stored")  # not inside the f-string: extraction of strings does not look there
        placeholder = f"{MASK} {known}" if stored else _("not set")
        super().__init__(
            label=capfirst(SECRET_LABELS.get(name, name)),
            required=False,
            help_text=PROXY_HELP if name == "proxy" else SECRET_HELP,
            widget=UnfoldAdminPasswordWidget(attrs={"placeholder": placeholder, "autocomplete": "new-password"}),
        )


def merge_secrets(stored: Mapping[str, Any], given: Mapping[str, str]) -> dict[str, Any]:
    """Merge typed secrets into the stored ones. Empty keeps a secret, "-" removes it."""
    kept = {name: stored[name] for name in given if name in stored}
    for name, value in given.items():
        if value == "-":
            kept.pop(name, None)
        elif value:
            kept[name] = value
    return kept
