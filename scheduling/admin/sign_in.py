"""Sign in with a password, a code or a provider, show the own account, and add the addresses of these pages."""

from __future__ import annotations

import time
from typing import Any, cast
from urllib.parse import urlencode

import structlog
from django import forms
from django.conf import settings
from django.contrib import admin, messages
from django.contrib.auth import load_backend, logout
from django.contrib.auth import login as open_session
from django.contrib.auth.models import User
from django.contrib.auth.views import LoginView
from django.core.exceptions import PermissionDenied, ValidationError
from django.db import transaction
from django.http import Http404, HttpRequest, HttpResponse, HttpResponseBase
from django.shortcuts import redirect
from django.urls import URLPattern, path, reverse
from django.utils.crypto import constant_time_compare
from django.utils.decorators import method_decorator
from django.utils.http import url_has_allowed_host_and_scheme
from django.utils.translation import gettext, ngettext
from django.utils.translation import gettext_lazy as _
from django.views.decorators.cache import never_cache
from django.views.decorators.debug import sensitive_post_parameters
from django.views.decorators.http import require_GET, require_http_methods, require_POST, require_safe
from unfold.forms import AuthenticationForm
from unfold.widgets import UnfoldAdminTextInputWidget

from scheduling.admin import user
from scheduling.admin.base import render_site_page
from scheduling.admin.undo import answer_undo
from scheduling.audit import record_action
from scheduling.identity import openid, sign_ins, totp
from scheduling.identity.openid import SubjectRefused, find_or_create_user
from scheduling.models import SignIn
from scheduling.web import login_lockout

log = structlog.get_logger(__name__)


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
        login_lockout.reset_tries(request, user)
        return True
    record_action("login_failed", user, label=user.get_username(), actor="", reason=gettext("second factor"))
    form.refuse_code(request)
    return False


class SignInView(LoginView):
    """The first page: name and password, or the provider's button."""

    authentication_form = LoginForm
    template_name = "ops/sign_in.html"

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
        provider, target = "", self.get_redirect_url()
        if settings.AFTERTOUCH_OIDC_ISSUER:
            query = f"?{urlencode({'next': target})}" if target else ""
            provider = reverse("admin:login_provider") + query
        own = {
            **admin.site.each_context(self.request), "title": _("Log in"), "subtitle": None,
            "app_path": self.request.get_full_path(), "username": self.request.user.get_username(),
            "provider": provider, "by_password": not settings.AFTERTOUCH_OIDC_ONLY,
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
    return render_site_page(request, "ops/sign_in_step.html", gettext("Second factor"), form=form)


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
    enrolment: dict[str, Any] = totp.describe_enrolment(device)
    return render_site_page(
        request, "ops/sign_in_step.html", gettext("Set up the second factor"), form=form, **enrolment
    )  # fmt: skip


def render_recovery_codes(request: HttpRequest, codes: list[str], back: str) -> HttpResponse:
    """Show new recovery codes, once."""
    return render_site_page(request, "ops/recovery_codes.html", gettext("Recovery codes"), codes=codes, back=back)


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


FLOW = "provider_flow"  #: key in the session
BACKEND = "django.contrib.auth.backends.ModelBackend"  #: reads the user of the session at each request
REFUSED = {
    "no_role": _(
        "The provider names no group that gives a role here. Ask an administrator. Your subject is %(subject)s."
    ),
    "taken": _(
        "A user with this name or e-mail address exists. An administrator can link it with your subject, %(subject)s."
    ),
    "disabled": _("This user is disabled. Your subject is %(subject)s."),
}


@never_cache
@require_GET
def start_provider_sign_in(request: HttpRequest) -> HttpResponse:
    """Lead to the provider, which is responsible for a second factor.

    The session keeps state, nonce and verifier for ten minutes.
    """
    if not settings.AFTERTOUCH_OIDC_ISSUER:
        raise Http404
    target = request.GET.get("next", "")
    if not url_has_allowed_host_and_scheme(target, {request.get_host()}, require_https=request.is_secure()):
        target = reverse("admin:index")
    back = settings.AFTERTOUCH_BASE_URL.rstrip("/") + reverse("admin:login_provider_answer")
    try:
        url, flow = openid.begin_flow(back, time.time())
    except openid.ProviderFailed as error:
        return _report_failure(request, error)
    request.session[FLOW] = {**flow, "target": target}
    return redirect(url)


@never_cache
@require_GET
def finish_provider_sign_in(request: HttpRequest) -> HttpResponse:
    """Check the provider's answer, once, and open the session."""
    flow = request.session.get(FLOW)
    if not settings.AFTERTOUCH_OIDC_ISSUER or flow is None:
        return _report_failure(request, "no sign-in is under way in this browser")
    if openid.is_flow_answer(flow, request.GET.dict()):  # the answer to an older tab must not end the flow of this one
        del request.session[FLOW]
    try:
        claims = openid.finish_flow(flow, request.GET.dict(), time.time())
    except openid.ProviderFailed as error:
        return _report_failure(request, error)
    try:
        user = find_or_create_user(claims)
    except SubjectRefused as refused:
        log.warning("provider_user_refused", reason=str(refused), subject=claims["sub"])
        messages.error(request, REFUSED[str(refused)] % {"subject": claims["sub"]})
        return redirect("admin:login")
    if not user.is_staff:
        messages.error(request, gettext("This user may not open the back office. Ask an administrator for a role."))
        return redirect("admin:login")
    open_session(request, user, backend=BACKEND)
    return redirect(flow["target"])


def _report_failure(request: HttpRequest, error: object) -> HttpResponse:
    """Log the cause, which only administrators read, and lead back to the sign-in."""
    log.warning("provider_sign_in_failed", error=str(error))
    messages.error(request, gettext("The sign-in at the provider failed. Try again, or ask an administrator."))
    return redirect("admin:login")


#: A part of the browser's own description, and its name. The first that fits counts: most claim to be others too.
BROWSERS = (
    ("MicroMessenger/", "WeChat"), ("Edg", "Edge"), ("OPR/", "Opera"), ("Firefox/", "Firefox"), ("Chrome/", "Chrome"),
    ("Safari/", "Safari"),
)  # fmt: skip
SYSTEMS = (
    ("Windows", "Windows"), ("Android", "Android"), ("iPhone", "iPhone"), ("iPad", "iPad"), ("Mac OS X", "macOS"),
    ("Linux", "Linux"),
)  # fmt: skip


@never_cache
@require_safe
def show_account(request: HttpRequest) -> HttpResponse:
    return _render_account(request, CodeForm())


@never_cache
@sensitive_post_parameters()
@require_POST
def change_second_factor(request: HttpRequest) -> HttpResponse:
    """Set up the second factor, confirm it, replace its recovery codes, or turn it off. The last two need a code."""
    user, form = _own_user(request), CodeForm(request.POST)
    wanted = request.POST.get("do", "")
    if wanted == "start":
        totp.start_enrolment(user)
        return redirect("admin:account")
    if wanted == "confirm" and form.is_valid():
        if codes := totp.confirm_enrolment(user, form.cleaned_data["code"]):
            admin_log(request, user, gettext("Turned the second factor on."))
            return render_recovery_codes(request, codes, back=reverse("admin:account"))
        form.refuse_code(request)
    if wanted == "codes" and check_code(request, user, form):
        with transaction.atomic():
            codes = totp.replace_recovery_codes(user)
            if codes:
                admin_log(request, user, gettext("Replaced the recovery codes."))
        if codes:
            return render_recovery_codes(request, codes, back=reverse("admin:account"))
        messages.warning(request, gettext("The second factor is off."))  # another request turned it off meanwhile
        return redirect("admin:account")
    if wanted == "off" and not settings.AFTERTOUCH_REQUIRE_TOTP and check_code(request, user, form):
        totp.reset_totp(user)
        admin_log(request, user, gettext("Turned the second factor off."))
        messages.success(request, gettext("The second factor is off."))
        return redirect("admin:account")
    return _render_account(request, form)


@require_POST
def end_one_sign_in(request: HttpRequest, pk: int) -> HttpResponse:
    """Sign out one browser of the user."""
    row = SignIn.objects.filter(user=_own_user(request), pk=pk).first()
    if row is None:
        raise Http404
    if row.digest == sign_ins.hash_session_key(str(request.session.session_key)):
        logout(request)
        return redirect("admin:login")
    sign_ins.end_sign_ins(row.user, only=pk)
    messages.success(request, gettext("Signed out there."))
    return redirect("admin:account")


@require_POST
def end_other_sign_ins(request: HttpRequest) -> HttpResponse:
    """Sign out all other browsers of the user."""
    count = sign_ins.end_sign_ins(_own_user(request), but=str(request.session.session_key))
    text = ngettext("Signed out %(count)s other browser.", "Signed out %(count)s other browsers.", count)
    messages.success(request, text % {"count": count})
    return redirect("admin:account")


def describe_browser(text: str) -> str:
    """Return browser and system of a `User-Agent`, such as "Firefox · Linux"; the start of the text if unknown."""
    names = [next((name for part, name in known if part in text), "") for known in (BROWSERS, SYSTEMS)]
    return " · ".join(filter(None, names)) or text[:40]


def admin_log(request: HttpRequest, user: User, text: str) -> None:
    """Note a change in the history of the user."""
    admin.site.get_model_admin(User).log_change(request, user, text)


def _own_user(request: HttpRequest) -> User:
    return cast("User", request.user)  # `admin_view` admits nobody else


def _render_account(request: HttpRequest, form: CodeForm) -> HttpResponse:
    user = _own_user(request)
    form.fields["code"].widget.attrs.pop("autofocus")  # the page has more than the code
    current = sign_ins.hash_session_key(str(request.session.session_key))
    rows: list[dict[str, Any]] = [
        {"row": row, "browser": describe_browser(row.browser), "is_current": row.digest == current}
        for row in sign_ins.list_sign_ins(user)
    ]
    device, enrolment = totp.find_device(user), dict[str, Any]()
    if waiting := totp.find_enrolment(user):
        form.ask_app_only()
        enrolment = totp.describe_enrolment(waiting)
    return render_site_page(
        request, "ops/account.html", gettext("My account"), form=form, sign_ins=rows,
        others=any(not row["is_current"] for row in rows), is_on=device is not None,
        codes_left=len(device.recovery_digests) if device else 0, is_required=settings.AFTERTOUCH_REQUIRE_TOTP,
        **enrolment,
    )  # fmt: skip


def list_site_pages() -> list[URLPattern]:
    """Return the addresses. `login/` comes before Django's own, which knows no second factor."""
    view = admin.site.admin_view
    return [
        path("login/", SignInView.as_view(), name="login"),
        path("login/code/", ask_code, name="login_code"),
        path("login/second-factor/", enrol_at_sign_in, name="login_enrolment"),
        path("login/provider/", start_provider_sign_in, name="login_provider"),
        path("login/provider/answer/", finish_provider_sign_in, name="login_provider_answer"),
        path("invitation/<str:token>/", user.accept, name="invitation_accept"),
        path("undo/<uuid:act_id>/", view(answer_undo), name="undo_act"),
        path("account/", view(show_account), name="account"),
        path("account/second-factor/", view(change_second_factor), name="account_second_factor"),
        path("account/sign-ins/<int:pk>/end/", view(end_one_sign_in), name="account_end_sign_in"),
        path("account/sign-ins/end-others/", view(end_other_sign_ins), name="account_end_others"),
    ]


admin.site.extra_urls = list_site_pages  # type: ignore[attr-defined]
