"""Pages of users and invitations."""

from __future__ import annotations

from typing import Any, ClassVar

from django import forms
from django.conf import settings
from django.contrib import admin, messages
from django.contrib.auth.admin import UserAdmin
from django.contrib.auth.forms import BaseUserCreationForm
from django.contrib.auth.models import User
from django.db import IntegrityError, transaction
from django.http import HttpRequest, HttpResponse
from django.shortcuts import redirect
from django.utils.safestring import SafeString
from django.utils.text import capfirst
from django.utils.timezone import now
from django.utils.translation import gettext
from django.utils.translation import gettext_lazy as _
from django.views.decorators.cache import never_cache
from django.views.decorators.debug import sensitive_post_parameters
from django.views.decorators.http import require_http_methods
from unfold.admin import ModelAdmin, TabularInline
from unfold.forms import AdminPasswordChangeForm, UserChangeForm, UserCreationForm
from unfold.widgets import UnfoldAdminPasswordWidget, UnfoldAdminSelectWidget, UnfoldAdminTextInputWidget

from scheduling.admin.base import (
    Confirmation,
    OpsAdmin,
    OpsPages,
    ops_display,
    render_site_page,
    row_action,
)
from scheduling.admin.labels import TranslatedPermissions
from scheduling.admin.row_edits import VERSION_FIELD, OptimisticLockForm, OptimisticLockFormSet
from scheduling.admin.shown_values import render_tag
from scheduling.identity import invitations, totp
from scheduling.identity.invitations import SHORT_LABELS, assign_roles, find_role
from scheduling.models import IdentityLink, Invitation, Role

admin.site.unregister(User)


class PersonForm(OptimisticLockForm, UserChangeForm):  # type: ignore[misc]
    role = forms.ChoiceField(
        label=_("role"), choices=[("", _("A selection of single rights")), *Role.choices], required=False,
        widget=UnfoldAdminSelectWidget,
        help_text=_("A new role replaces the old one and gives access to the back office."),
    )  # fmt: skip

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if "role" in self.fields:
            self.fields["role"].initial = find_role(self.instance)
            self.fields["role"].label = capfirst(self.fields["role"].label)


class NewPersonForm(UserCreationForm):  # type: ignore[misc]
    role = forms.ChoiceField(label=_("role"), choices=Role.choices, widget=UnfoldAdminSelectWidget)


class IdentityLinkForm(OptimisticLockForm):
    written_columns = ("issuer",)

    class Meta:
        model = IdentityLink
        fields: ClassVar[Any] = ("subject",)

    @property
    def issuer(self) -> str:
        return str(settings.AFTERTOUCH_OIDC_ISSUER)

    def clean_subject(self) -> str:
        subject = str(self.cleaned_data["subject"])
        same = IdentityLink.objects.filter(issuer=self.issuer, subject=subject).exclude(pk=self.instance.pk)
        if same.exists():
            raise forms.ValidationError(gettext("Another user is linked with this subject."))
        return subject


class IdentityLinkInline(TabularInline):  # type: ignore[misc]
    """The link with the provider, which only administrators set: its holder signs in as this user."""

    model = IdentityLink
    form = IdentityLinkForm
    formset = OptimisticLockFormSet
    fields = (VERSION_FIELD, "subject")
    extra = 0

    def has_view_permission(self, request: HttpRequest, obj: Any = None) -> bool:
        return bool(settings.AFTERTOUCH_OIDC_ISSUER and request.user.is_superuser)

    has_add_permission = has_change_permission = has_delete_permission = has_view_permission


@admin.register(User)
class PersonAdmin(OpsPages, TranslatedPermissions, UserAdmin, ModelAdmin):  # type: ignore[type-arg, misc]
    form = PersonForm
    add_form = NewPersonForm
    change_password_form = AdminPasswordChangeForm
    inlines = (IdentityLinkInline,)
    list_display = ("username", "full_name", "role_name", "second_factor", "is_active", "last_login")
    actions_detail = ("reset_second_factor",)
    readonly_fields = ("second_factor", "last_login", "date_joined")
    fieldsets = (
        (None, {"fields": ("username", "role", "is_active", "second_factor", "password")}),
        (_("Personal info"), {"fields": ("first_name", "last_name", "email")}),
        (
            _("Single rights, for experts"),
            {"classes": ("collapse",), "fields": ("is_staff", "is_superuser", "groups", "user_permissions")},
        ),
        (_("Important dates"), {"fields": ("last_login", "date_joined")}),
    )
    add_fieldsets = (
        (None, {"classes": ("wide",), "fields": ("username", "role", "usable_password", "password1", "password2")}),
    )

    def get_queryset(self, request: HttpRequest) -> Any:
        found = super().get_queryset(request).select_related("totp_device")
        return found.prefetch_related("groups", "user_permissions")

    def save_related(self, request: HttpRequest, form: Any, formsets: Any, change: bool) -> None:
        """Store the role after the single rights, which it replaces."""
        super().save_related(request, form, formsets, change)
        role = form.cleaned_data.get("role")
        if role and (not change or "role" in form.changed_data):
            form.instance.user_permissions.clear()
            assign_roles(form.instance, [role], by=request.user.get_username())

    @ops_display(description=_("full name"))
    def full_name(self, row: User) -> str:
        return row.get_full_name() or "–"

    @ops_display(description=_("role"))
    def role_name(self, row: User) -> str:
        role = find_role(row)
        if not row.is_staff:
            return gettext("No access to the back office")
        return str(SHORT_LABELS[role]) if role else gettext("Single rights")

    @ops_display(description=_("second factor"))
    def second_factor(self, row: User) -> SafeString:
        device = getattr(row, "totp_device", None)
        is_on = device is not None and device.confirmed_at
        return render_tag(gettext("On"), "success") if is_on else render_tag(gettext("Off"), "info")

    @row_action(
        _("Reset the second factor"), icon="phonelink_erase", permission="change",
        allowed=lambda row: hasattr(row, "totp_device"),
    )  # fmt: skip
    def reset_second_factor(self, request: HttpRequest, row: User) -> Confirmation:
        return Confirmation(
            title=gettext("Reset the second factor of “%(name)s”?") % {"name": row}, button=gettext("Reset"),
            text=gettext("The authenticator app and the recovery codes stop working. The password stays."), danger=True,
            act=lambda: totp.reset_totp(row), logged=gettext("Reset the second factor."),
            done=gettext("The second factor is off. The user can set up a new one."),
        )  # fmt: skip


class InvitationForm(OptimisticLockForm):
    class Meta:
        model = Invitation
        fields: ClassVar[Any] = ("name", "email", "role")
        help_texts: ClassVar[Any] = {
            "name": _("The login name that is proposed. The colleague can choose another one."),
            "email": _("The link is sent there if AFTERTOUCH_EMAIL_URL is set."),
        }

    def clean(self) -> dict[str, Any]:
        cleaned: dict[str, Any] = super().clean()
        if not cleaned.get("name") and not cleaned.get("email") and not self.errors:
            self.add_error("name", gettext("Enter a name or an e-mail address."))
        return cleaned


@admin.register(Invitation)
class InvitationAdmin(OpsAdmin):
    """Invitations, for administrators only: a role is given with each of them."""

    form = InvitationForm
    list_display = ("who", "role_name", "shown_state", "invited_by", "created_at", "expires_at")
    search_fields = ("name", "email")
    readonly_fields = ("shown_state", "invited_by", "created_at", "expires_at", "accepted_at", "withdrawn_at", "user")
    list_select_related = ("invited_by",)
    actions_row = ("withdraw",)
    forbidden = frozenset({"change", "delete"})  # the list shows who came in by whom

    def layout(self, request: HttpRequest, obj: Any) -> list[Any]:
        fields = ("name", "email", "role")
        return [(None, {"fields": fields if obj is None else (*fields, *self.readonly_fields)})]

    def has_view_permission(self, request: HttpRequest, obj: Any = None) -> bool:
        return invitations.may_invite(request.user)  # type: ignore[arg-type]

    def has_add_permission(self, request: HttpRequest) -> bool:
        return self.has_view_permission(request) and not settings.AFTERTOUCH_OIDC_ONLY

    def save_model(self, request: HttpRequest, obj: Any, form: Any, change: bool) -> None:
        given = form.cleaned_data
        row, obj.token = invitations.create_invitation(given["name"], given["email"], given["role"], request.user)  # type: ignore[arg-type]
        obj.pk = row.pk

    def response_add(self, request: HttpRequest, obj: Any, post_url_continue: Any = None) -> HttpResponse:
        """Show the link on the page itself. A message would travel in a cookie."""
        link, row = invitations.build_link(obj.token), Invitation.objects.get(pk=obj.pk)
        page = self.page(
            request, "ops/invitation_link.html", gettext("The new invitation"), link=link, original=row,
            back=self.url("changelist"),
        )  # fmt: skip
        page["Cache-Control"] = "no-store"
        # The page is rendered after this transaction. A mail must not name an invitation that was rolled back.
        page.context_data["outcome"] = {}  # type: ignore[index]
        transaction.on_commit(lambda: page.context_data["outcome"].update(sent=invitations.mail_invitation(row, link)))  # type: ignore[index]
        return page

    @ops_display(description=_("invited"))
    def who(self, row: Invitation) -> str:
        return " · ".join(filter(None, (row.name, row.email)))

    @ops_display(description=_("role"))
    def role_name(self, row: Invitation) -> str:
        return str(SHORT_LABELS[row.role])

    @ops_display(description=_("state"))
    def shown_state(self, row: Invitation) -> SafeString:
        if row.accepted_at:
            return render_tag(gettext("Accepted"), "success")
        if row.withdrawn_at:
            return render_tag(gettext("Withdrawn"), "danger")
        if row.expires_at <= now():
            return render_tag(gettext("Expired"), "warning")
        if settings.AFTERTOUCH_OIDC_ONLY or not invitations.may_invite(row.invited_by):
            text = gettext("Refused: sign-in at the provider only, or the inviter lost the right")
            return render_tag(text, "warning")
        return render_tag(gettext("Waits for the colleague"), "info")

    @row_action(_("Withdraw"), icon="link_off", permission="view")
    def withdraw(self, request: HttpRequest, row: Invitation) -> Confirmation:
        return Confirmation(
            title=gettext("Withdraw the invitation of “%(name)s”?") % {"name": row}, button=gettext("Withdraw"),
            text=gettext("The link stops working at once. You can invite again."), danger=True,
            act=lambda: invitations.withdraw_invitation(row), logged=gettext("Withdrawn."),
            done=gettext("The invitation was withdrawn."), unchanged=gettext("The invitation is not open any more."),
            back=self.url("changelist"),
        )  # fmt: skip


class AcceptanceForm(BaseUserCreationForm):  # type: ignore[type-arg]
    """Name and password of the new user."""

    class Meta(BaseUserCreationForm.Meta):
        model = User
        fields: ClassVar[Any] = ("username",)

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.fields["username"].widget = UnfoldAdminTextInputWidget(attrs={"autocomplete": "username"})
        for name in ("password1", "password2"):
            self.fields[name].widget = UnfoldAdminPasswordWidget(attrs={"autocomplete": "new-password"})


@never_cache
@sensitive_post_parameters()
@require_http_methods(["GET", "HEAD", "POST"])
def accept(request: HttpRequest, token: str) -> HttpResponse:
    """Let the invited colleague choose a name and a password."""
    page, title = "ops/invitation_accept.html", gettext("Invitation")
    try:
        row = invitations.find_invitation(token)
        form = AcceptanceForm(request.POST or None, initial={"username": row.name or row.email.partition("@")[0]})
        if request.method == "POST" and form.is_valid():
            invitations.accept_invitation(token, form.save(commit=False))
            messages.success(request, gettext("Welcome. Log in with the name and the password that you have chosen."))
            return redirect("admin:index")
    except IntegrityError:  # another request has stored the name since the check
        form.add_error("username", gettext("A user with this name exists."))
    except invitations.InvitationEnded as ended:
        return render_site_page(request, page, title, status=404, form=None, reason=ended.reason)
    return render_site_page(request, page, title, form=form, role=SHORT_LABELS[row.role])
