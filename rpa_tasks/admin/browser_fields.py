"""The browser settings in the forms of platforms and shops."""

from __future__ import annotations

from typing import Any

from django import forms
from django.http import HttpRequest
from django.utils.translation import gettext_lazy as _
from unfold.widgets import UnfoldAdminTextareaWidget, UnfoldAdminTextInputWidget

from rpa_tasks.configuration.browser_settings import (
    ALLOWED_FLAGS,
    LISTS,
    SECRETS,
    SETTINGS,
    needs_new_password,
    normalize_address,
)
from scheduling.admin.base import CheckedForm, OpsAdmin
from scheduling.admin.form_fields import NamesField
from scheduling.admin.matrix.channel import SEALED, SecretField, get_readable_secrets, merge_secrets
from scheduling.models.encrypted import Sealed

LABELS = {
    "language": (_("language"), _("Like zh-CN. Pages see it; empty: the server's.")),
    "timezone": (_("time zone"), _("Like Asia/Shanghai. Pages see it; empty: the server's.")),
    "window": (_("window size"), _("Like 1366x768.")),
    "downloads": (_("download folder"), _("Name of the folder in a run's directory; empty: Downloads.")),
    "flags": (_("more flags"), _("One a line. Allowed: %(flags)s")),
    "extensions": (_("extensions"), _(
        "Names of folders in AFTERTOUCH_RPA_EXTENSIONS_DIR of the execution nodes, one a line. A run does not start "
        "where one is missing."
    )),
    "proxy_url": (_("proxy"), _(
        "Like http://proxy.example:8080 or socks5://proxy.example:1080. A run starts only if the echo page "
        "sees another address than that of the node. “direct” in a shop: no proxy, whatever its platform has."
    )),
    "cdp_url": (_("browser elsewhere"), _(
        "DevTools address of a browser that you run, like http://10.0.0.5:9222; no other shop may use it. A platform's "
        "has {shop_id} in it. “own” in a shop: a browser of the pool. The other settings have no effect on it."
    )),
}  # fmt: skip
SECRET_NAMES = {"username": _("user name at the proxy"), "password": _("password at the proxy")}


class FlagsField(NamesField):
    """Flags, one a line: a value may have commas."""

    def to_python(self, value: Any) -> Any:
        lines = [line.strip() for line in (forms.CharField.to_python(self, value) or "").splitlines()]
        return list(dict.fromkeys(line for line in lines if line))


class BrowserForm(CheckedForm):
    """Form of a row with browser settings, which it stores as members of two columns."""

    written_columns = ("browser", "proxy_secret")

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        for name, (label, text) in LABELS.items():
            kind: Any = FlagsField if name in LISTS else forms.CharField
            widget = UnfoldAdminTextareaWidget(attrs={"rows": 3}) if name in LISTS else UnfoldAdminTextInputWidget()
            shown = text % {"flags": ", ".join(sorted(ALLOWED_FLAGS))} if name == "flags" else text
            field = kind(label=label, help_text=shown, required=False, widget=widget)
            field.initial = self.instance.browser.get(name, [] if name in LISTS else "")
            self.fields[f"browser_{name}"] = field
        self.stored = get_readable_secrets(self.instance.proxy_secret)
        for name, label in SECRET_NAMES.items():
            self.fields[f"secret_{name}"] = SecretField(name, bool(self.stored.get(name)))
            self.fields[f"secret_{name}"].label = label

    def values(self) -> dict[str, Any]:
        cleaned = super().values()
        given = {name: cleaned.pop(f"browser_{name}", None) for name in SETTINGS}
        given["cdp_url"] = normalize_address(given["cdp_url"] or "")
        typed = {name: cleaned.pop(f"secret_{name}", "").strip() for name in SECRETS}
        self.browser = {name: value for name, value in given.items() if value}
        self.proxy_secret: Any = self.instance.proxy_secret
        again = needs_new_password(self.instance, given.get("proxy_url") or "") and not all(typed.values())
        if again and "secret_password" not in self.errors:
            self.add_error("secret_password", _("Enter user name and password again for another proxy."))
        if any(typed.values()) or not isinstance(self.proxy_secret, Sealed):
            self.proxy_secret = merge_secrets(self.stored, typed)
        secrets = get_readable_secrets(self.proxy_secret)
        return (
            cleaned
            | {f"browser.{path}": given[name] for name, path in SETTINGS.items()}
            | {f"browser.{path}": secrets.get(name, "") for name, path in SECRETS.items()}
        )

    def find_error_field(self, path: str) -> str | None:
        for name, inner in SETTINGS.items():
            if path == f"browser.{inner}":
                return f"browser_{name}"
        for name, inner in SECRETS.items():
            if path == f"browser.{inner}":
                return f"secret_{name}"
        return super().find_error_field(path)


class BrowserAdmin(OpsAdmin):
    """A page whose form has browser settings."""

    def browser_layout(self, request: HttpRequest, obj: Any) -> list[Any]:
        """Return the section of the browser."""
        fields = (
            ("browser_language", "browser_timezone"), ("browser_window", "browser_downloads"), "browser_proxy_url",
            ("secret_username", "secret_password"), "browser_flags", "browser_extensions",
            "browser_cdp_url",
        )  # fmt: skip
        section: dict[str, Any] = {"fields": fields, "classes": ["collapse"]}
        if obj is not None and isinstance(obj.proxy_secret, Sealed):
            section["description"] = SEALED
        return [(_("Browser"), section)]
