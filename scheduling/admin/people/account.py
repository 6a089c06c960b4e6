"""My account: the user's own second factor and sign-ins."""

from __future__ import annotations

from typing import Any

from django.conf import settings
from django.contrib import admin, messages
from django.contrib.auth import logout
from django.contrib.auth.models import User
from django.http import Http404, HttpRequest, HttpResponse
from django.shortcuts import redirect, render
from django.urls import reverse
from django.utils.translation import gettext, ngettext
from django.views.decorators.cache import never_cache
from django.views.decorators.debug import sensitive_post_parameters
from django.views.decorators.http import require_POST, require_safe

from scheduling.admin.people.sign_in import CodeForm, check_code, render_recovery_codes
from scheduling.identity import sign_ins, totp
from scheduling.models import SignIn

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
        admin_log(request, user, gettext("Replaced the recovery codes."))
        codes = totp.replace_recovery_codes(user)
        return render_recovery_codes(request, codes, back=reverse("admin:account"))
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
    return User.objects.get(username=request.user.get_username())


def _render_account(request: HttpRequest, form: CodeForm) -> HttpResponse:
    user = _own_user(request)
    form.fields["code"].widget.attrs.pop("autofocus")  # the page has more than the code
    current = sign_ins.hash_session_key(str(request.session.session_key))
    rows: list[dict[str, Any]] = [
        {"row": row, "browser": describe_browser(row.browser), "is_current": row.digest == current}
        for row in sign_ins.list_sign_ins(user)
    ]
    waiting = totp.find_enrolment(user)
    if waiting:
        form.ask_app_only()
    context = {
        **admin.site.each_context(request), "title": gettext("My account"), "form": form, "sign_ins": rows,
        "others": any(not row["is_current"] for row in rows), "is_on": totp.find_device(user) is not None,
        "codes_left": totp.count_recovery_codes(user), "is_required": settings.AFTERTOUCH_REQUIRE_TOTP,
        **(totp.describe_enrolment(waiting) if waiting else {}),
    }  # fmt: skip
    return render(request, "ops/account.html", context)
