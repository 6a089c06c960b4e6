"""Add the pages that belong to no model to the site: sign-in, account, invitation and undo."""

from __future__ import annotations

from django.contrib import admin
from django.urls import URLPattern, path

from scheduling.admin.people import account, invitation, provider, sign_in
from scheduling.admin.undo import answer_undo


def list_site_pages() -> list[URLPattern]:
    """Return the addresses. `login/` comes before Django's own, which knows no second factor."""
    view = admin.site.admin_view
    return [
        path("login/", sign_in.SignInView.as_view(), name="login"),
        path("login/code/", sign_in.ask_code, name="login_code"),
        path("login/second-factor/", sign_in.enrol_at_sign_in, name="login_enrolment"),
        path("login/provider/", provider.start_provider_sign_in, name="login_provider"),
        path("login/provider/answer/", provider.finish_provider_sign_in, name="login_provider_answer"),
        path("invitation/<str:token>/", invitation.accept, name="invitation_accept"),
        path("undo/<uuid:act_id>/", view(answer_undo), name="undo_act"),
        path("account/", view(account.show_account), name="account"),
        path("account/second-factor/", view(account.change_second_factor), name="account_second_factor"),
        path("account/sign-ins/<int:pk>/end/", view(account.end_one_sign_in), name="account_end_sign_in"),
        path("account/sign-ins/end-others/", view(account.end_other_sign_ins), name="account_end_others"),
    ]


admin.site.extra_urls = list_site_pages  # type: ignore[attr-defined]
