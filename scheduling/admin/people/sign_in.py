"""Sign in: the password, then a code of the second factor where the user has one."""

from __future__ import annotations

import time
from typing import Any
from urllib.parse import urlencode

from django import forms
from django.conf import settings
from django.contrib import admin, messages
from django.contrib.auth import load_backend
from django.contrib.auth import login as open_session
from django.contrib.auth.models import User
from django.contrib.auth.views import LoginView
from django.core.exceptions import PermissionDenied, ValidationError
from django.http import HttpRequest, HttpResponse, HttpResponseBase
from django.shortcuts import redirect, render
from django.urls import reverse
from django.utils.crypto import constant_time_compare
from django.utils.decorators import method_decorator
from django.utils.translation import gettext, ngettext
from django.utils.translation import gettext_lazy as _
from django.views.decorators.cache import never_cache
from django.views.decorators.debug import sensitive_post_parameters
from django.views.decorators.http import require_http_methods
from unfold.forms import AuthenticationForm
from unfold.widgets import UnfoldAdminTextInputWidget

from scheduling.audit import record_action
from scheduling.identity import totp
from scheduling.web import login_lockout

HELD = "held_sign_in"  #: key in the session of a sign-in that waits for its second factor
HELD_FOR = 600  #: seconds


def build_locked_text(minutes: int) -> str:
    text = ngettext(
        "Too many failed logins with this name from where you are. Try again in %(minutes)s minute, or ask an "
        "administrator to unlock it.",
        "Too many failed logins with this name from where you are. Try again in %(minutes)s minutes, or ask an "
        "administrator to unlock it.",
        minutes,
    )
    return text % {"minutes": minutes}


class LoginForm(AuthenticationForm):  # type: ignore[misc]
    """Show a lockout after too many wrong passwords. The text is the same for unknown users."""

    def get_invalid_login_error(self) -> ValidationError:
        minutes = login_lockout.locked_minutes(self.request)
        if not minutes:
            return super().get_invalid_login_error()  # type: ignore[no-any-return]
        return ValidationError(build_locked_text(minutes), code="locked")


class CodeForm(forms.Form):
    """A code of the authenticator app, or a recovery code."""

    code = forms.CharField(
        label=_("Six digits or a recovery code"),
        max_length=40,
        widget=UnfoldAdminTextInputWidget(
            attrs={"autocomplete": "one-time-code", "autofocus": True, "autocapitalize": "none", "spellcheck": "false"}
        ),
    )

    def ask_app_only(self) -> None:
        """Ask for no recovery code: none exists before the app is confirmed."""
        self.fields["code"].label = gettext("Six digits")

    def refuse_code(self, request: HttpRequest) -> None:
        minutes = login_lockout.locked_minutes(request)
        self.add_error("code", build_locked_text(minutes) if minutes else gettext("The code is wrong or was used."))


def check_code(request: HttpRequest, user: User, form: CodeForm) -> bool:
    """Return whether the posted code is accepted. A try counts as one of a password; the form gets the error."""
    if not form.is_valid():
        return False
    try:
        login_lockout.count_login_try(request, user.get_username())
    except PermissionDenied:
        form.refuse_code(request)
        return False
    if totp.accept_code(user, form.cleaned_data["code"]):
        return True
    record_action("login_failed", user, label=user.get_username(), actor="", reason="second factor")
    form.refuse_code(request)
    return False


class SignInView(LoginView):
    """The first page: name and password, or the provider's button."""

    authentication_form = LoginForm
    template_name = "ops/sign_in.html"

    @method_decorator(sensitive_post_parameters())
    @method_decorator(never_cache)
    def dispatch(self, request: Any, *args: Any, **kwargs: Any) -> HttpResponseBase:
        request.current_app = admin.site.name
        if request.method == "GET" and admin.site.has_permission(request):
            return redirect("admin:index")
        if request.method == "POST" and settings.AFTERTOUCH_OIDC_ONLY:
            raise PermissionDenied
        return super().dispatch(request, *args, **kwargs)

    def form_valid(self, form: Any) -> HttpResponse:
        return continue_sign_in(self.request, form.get_user(), self.get_success_url())

    def get_context_data(self, **kwargs: Any) -> dict[str, Any]:
        own = {
            **admin.site.each_context(self.request), "title": _("Log in"), "subtitle": None,
            "app_path": self.request.get_full_path(), "username": self.request.user.get_username(),
            "provider": _build_provider_link(self.get_redirect_url()), "by_password": not settings.AFTERTOUCH_OIDC_ONLY,
        }  # fmt: skip
        return super().get_context_data(**own, **kwargs)


def continue_sign_in(request: HttpRequest, user: User, target: str) -> HttpResponse:
    """Open the session of a user with a right password, or ask for the second factor first."""
    if totp.find_device(user):
        return _hold_sign_in(request, user, target, "admin:login_code")
    if settings.AFTERTOUCH_REQUIRE_TOTP:
        totp.start_enrolment(user)
        return _hold_sign_in(request, user, target, "admin:login_enrolment")
    open_session(request, user)
    return redirect(target)


@never_cache
@sensitive_post_parameters()
@require_http_methods(["GET", "HEAD", "POST"])
def ask_code(request: HttpRequest) -> HttpResponse:
    """Ask for a code after the password."""
    held = _find_held_user(request)
    if held is None:
        return _start_over(request)
    form = CodeForm(request.POST or None)
    if request.method == "POST" and check_code(request, held, form):
        return redirect(_release_sign_in(request, held))
    return _render_step(request, gettext("Second factor"), form=form)


@never_cache
@sensitive_post_parameters()
@require_http_methods(["GET", "HEAD", "POST"])
def enrol_at_sign_in(request: HttpRequest) -> HttpResponse:
    """Set up the second factor before the first session, where `AFTERTOUCH_REQUIRE_TOTP` demands it."""
    held = _find_held_user(request)
    device = totp.find_enrolment(held) if held else None
    # A later sign-in has a secret of its own, which this one must not see.
    if held is None or device is None or request.session[HELD]["at"] < device.created_at.timestamp():
        return _start_over(request)
    form = CodeForm(request.POST or None)
    form.ask_app_only()
    if request.method == "POST" and form.is_valid():
        codes = totp.confirm_enrolment(held, form.cleaned_data["code"])
        if codes:
            return render_recovery_codes(request, codes, back=_release_sign_in(request, held))
        form.refuse_code(request)
    return _render_step(request, gettext("Set up the second factor"), form=form, **totp.describe_enrolment(device))


def render_recovery_codes(request: HttpRequest, codes: list[str], back: str) -> HttpResponse:
    """Show new recovery codes, once."""
    title = gettext("Recovery codes")
    context = {**admin.site.each_context(request), "title": title, "codes": codes, "back": back}
    return render(request, "ops/recovery_codes.html", context)


def _hold_sign_in(request: HttpRequest, user: User, target: str, page: str) -> HttpResponse:
    request.session.cycle_key()
    request.session[HELD] = {
        "user": user.pk, "backend": user.backend, "hash": user.get_session_auth_hash(),
        "target": target, "at": time.time(),
    }  # fmt: skip
    return redirect(page)


def _find_held_user(request: HttpRequest) -> User | None:
    """Return the user whose password was right within the last ten minutes. A new password ends it."""
    held = request.session.get(HELD)
    if not held or time.time() - held["at"] > HELD_FOR:
        return None
    user = load_backend(held["backend"]).get_user(held["user"])  # None for a disabled user
    return user if user and constant_time_compare(held["hash"], user.get_session_auth_hash()) else None


def _release_sign_in(request: HttpRequest, user: User) -> str:
    """Open the session. Return the page that the user wanted."""
    held = request.session.pop(HELD)
    open_session(request, user, backend=held["backend"])
    return str(held["target"])


def _start_over(request: HttpRequest) -> HttpResponse:
    request.session.pop(HELD, None)
    messages.warning(request, gettext("The sign-in has expired. Enter name and password."))
    return redirect("admin:login")


def _render_step(request: HttpRequest, title: str, **context: Any) -> HttpResponse:
    return render(request, "ops/sign_in_step.html", {**admin.site.each_context(request), "title": title, **context})


def _build_provider_link(target: str) -> str:
    if not settings.AFTERTOUCH_OIDC_ISSUER:
        return ""
    query = f"?{urlencode({'next': target})}" if target else ""
    return reverse("admin:login_provider") + query
