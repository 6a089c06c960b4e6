"""Sign in at the OpenID provider of `AFTERTOUCH_OIDC_ISSUER`. The provider is responsible for a second factor."""

from __future__ import annotations

import time

import structlog
from django.conf import settings
from django.contrib import messages
from django.contrib.auth import login as open_session
from django.http import Http404, HttpRequest, HttpResponse
from django.shortcuts import redirect
from django.urls import reverse
from django.utils.http import url_has_allowed_host_and_scheme
from django.utils.translation import gettext
from django.utils.translation import gettext_lazy as _
from django.views.decorators.cache import never_cache
from django.views.decorators.http import require_GET

from scheduling.identity import openid
from scheduling.identity.openid import SubjectRefused, find_or_create_user

log = structlog.get_logger(__name__)

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
    """Lead to the provider. The session keeps state, nonce and verifier for ten minutes."""
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
