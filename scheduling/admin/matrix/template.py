"""Pages of templates: texts, preview, and test messages."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from django import forms
from django.contrib import admin
from django.core.exceptions import PermissionDenied, ValidationError
from django.db.models import Q, QuerySet
from django.http import HttpRequest, HttpResponse, JsonResponse
from django.shortcuts import get_object_or_404
from django.utils.timezone import now
from django.utils.translation import get_language, gettext, gettext_lazy
from django.utils.translation import gettext_lazy as _
from unfold.admin import StackedInline
from unfold.contrib.filters.admin import ChoicesDropdownFilter
from unfold.widgets import UnfoldAdminSelectWidget, UnfoldAdminTextInputWidget

from scheduling.admin.base import (
    CheckedForm,
    HistoryAdmin,
    Retirable,
    RetiredFilter,
    ops_display,
    row_action,
    table_page,
)  # fmt: skip
from scheduling.admin.form_fields import DataField, SuggestingInput
from scheduling.admin.labels import describe_problem, translate_error, translate_reason
from scheduling.admin.matrix.channel import list_known_communities
from scheduling.admin.row_edits import VERSION_FIELD, OptimisticLockForm, OptimisticLockFormSet
from scheduling.channels.base import Delivered, Message, Outcome, Unknown
from scheduling.channels.http_client import send_once
from scheduling.configuration import snapshot
from scheduling.delivery import routing
from scheduling.ids import new_id, parse_number
from scheduling.models import ChannelConfig, Community, Customer, Node, Template, TemplateText
from scheduling.models.encrypted import Unreadable
from scheduling.policy.specs import CustomerSpec, EventSpec, TemplateSpec, TextSpec
from scheduling.strict_text import storable_text
from scheduling.templating import CannotRender, choose_text, read_locale, render_message

LONGEST_SUMMARY = 60  #: characters
SUGGESTED = 500  #: chats that the input suggests; others can be typed


def sample_customer(user_id: str) -> CustomerSpec:
    """Return the customer, or an invented one if it does not exist."""
    row = Customer.objects.filter(user_id=user_id).first() if user_id else None
    if row is None:
        return CustomerSpec(0, user_id or "sample", name=user_id or gettext("Zhang San"), level="normal")
    return row.spec()


def sample_event(user_id: str, chat_id: str, data: Mapping[str, Any]) -> EventSpec:
    return EventSpec(new_id(), "admin", "sample", "sample", now(), user_id, chat_id, data)


def render_preview(request: HttpRequest, text: TextSpec) -> HttpResponse:
    """Render a text with the sample data of the request, as JSON with `problem` on errors."""
    try:
        data = DataField().clean(request.POST.get("data", ""))
    except ValidationError as error:
        return JsonResponse({"body": "", "subject": "", "problem": " ".join(error.messages)})
    who = sample_customer(storable_text(request.POST.get("user_id", "").strip()))
    event = sample_event(who.user_id, request.POST.get("chat_id", "").strip(), data)
    try:
        subject, body, _locale = render_message(TemplateSpec(0, "preview", 0, "", "", (text,)), who, event)
    except CannotRender as error:
        return JsonResponse({"body": "", "subject": "", "problem": translate_error(str(error))})
    return JsonResponse({"body": body, "subject": subject, "problem": ""})


class TestMessageForm(forms.Form):
    channel = forms.ModelChoiceField(
        ChannelConfig.objects.filter(retired_at=None), label=gettext_lazy("channel"), widget=UnfoldAdminSelectWidget
    )
    community = forms.ModelChoiceField(
        Community.objects.filter(retired_at=None),
        label=gettext_lazy("chat id"),
        required=False,
        to_field_name="chat_id",
        widget=SuggestingInput(lambda: list_known_communities().values_list("chat_id", "name")[:SUGGESTED]),
        help_text=gettext_lazy("For robots of group chats and webhooks."),
    )
    user_id = forms.CharField(
        label=gettext_lazy("user id"),
        required=False,
        max_length=200,
        widget=UnfoldAdminTextInputWidget,
        help_text=gettext_lazy("For channels that send to a customer's own address, like mail."),
    )
    event_data = DataField(label=gettext_lazy("event data (JSON)"))


def describe_outcome(outcome: Outcome | str) -> dict[str, Any]:
    """Return the template context of a test's outcome; a text is the reason why nothing was sent."""
    if isinstance(outcome, str):
        return {"kind": "error", "title": gettext("Not sent"), "text": outcome}
    if isinstance(outcome, Delivered):
        return {"kind": "success", "title": gettext("Delivered"), "text": outcome.reply, "status": outcome.status}
    title = gettext("Unknown: it may have been delivered") if isinstance(outcome, Unknown) else gettext("Not delivered")
    text = describe_problem(outcome.reason, outcome.detail)
    return {"kind": "error", "title": title, "text": text, "status": getattr(outcome, "status", None)}


def _send_test_message(template: Template, wanted: Mapping[str, Any]) -> tuple[Outcome | str, str]:
    """Send once, without the ledger and the guards.

    Returns the outcome and the body; a text instead of the outcome explains why nothing was sent.
    """
    config = snapshot.current()
    spec = config.channels[wanted["channel"].pk]
    community = wanted["community"]
    who = sample_customer(wanted["user_id"])
    chat_id = community.chat_id if community else ""
    communities = {community.chat_id: community.targets} if community else {}
    try:
        channel = routing.channel_of(spec)
        target = routing.target_for(spec, channel, who, chat_id, communities, routing.TargetLookup())
        event = sample_event(who.user_id, chat_id, wanted["event_data"])
        subject, body, locale = render_message(snapshot.template_spec(template), who, event, channel.escape)
    except routing.NoTarget as error:
        return f"{translate_reason(error.reason)}: {error}", ""
    except Unreadable as error:
        return f"{gettext('Secrets cannot be decrypted here')}: {error}", ""
    except CannotRender as error:
        return gettext("The text cannot be rendered: %(problem)s") % {"problem": translate_error(str(error))}, ""
    # A list of values for a vendor's template has no room for a mark.
    mark = "" if getattr(channel, "fills_template", False) else gettext("[Test]")
    task_id = new_id()
    message = Message(
        task_id=task_id, delivery_key=task_id, user_id=who.user_id, chat_id=chat_id, node="test",
        content_type=template.content_type, category=template.category,
        subject=f"{mark} {subject}".strip() if subject else "",
        body=f"{mark} {body}".strip(), locale=locale, repeatable=spec.idempotent, target=target,
        event={"source": event.source, "id": event.event_id, "type": event.type, "time": event.occurred_at},
    )  # fmt: skip
    return send_once(channel, message), message.body


def summarize_text(row: Template) -> str:
    """Return the subject, or else the first words, of the text in the reader's language; "" without a text."""
    spec = snapshot.template_spec(row)
    text = choose_text(spec, get_language() or "") if spec.texts else None
    line = " ".join((text.subject or text.body).split()) if text else ""
    return line if len(line) <= LONGEST_SUMMARY else f"{line[: LONGEST_SUMMARY - 1]}…"


class TemplateForm(CheckedForm):
    class Meta:
        model = Template
        exclude = ("version",)
        help_texts: ClassVar[Any] = {
            "tracks_links": _(
                "Links become short redirects, so that clicks are counted. Needs AFTERTOUCH_LINK_BASE_URL. Messages of "
                "robots to a group keep their links."
            ),
        }


class TextForm(OptimisticLockForm):
    """Refuse a text that cannot be rendered, and name the line or variable."""

    error_field = "body"

    class Meta:
        model = TemplateText
        fields = ("locale", "subject", "body")
        help_texts: ClassVar[Any] = {
            "locale": _(
                "Like zh-hans, zh-hant or en. Customers get the text nearest to their language, else that in the "
                "installation's."
            ),
            "subject": _("For mail, and the title of a card."),
            "body": _(
                "Variables: {{ user.name }}, {{ user.level }}, {{ chat.id }}, {{ event.type }}, {{ event.data.x }}. "
                'With filters: {{ event.data.x|default:"-" }}, {{ event.time|date:"Y-m-d H:i" }}'
            ),
        }


class TextFormSet(OptimisticLockFormSet):
    def clean(self) -> None:
        """Refuse two texts of one language, of which customers would get one. A file refuses them, too.

        Another page may have added a text since this one was shown. The template's form holds its lock.
        """
        super().clean()
        shown = [form.instance.pk for form in self.forms if form.instance.pk]
        others = TemplateText.objects.filter(template=self.instance.pk).exclude(pk__in=shown)
        seen = {read_locale(text.locale) for text in others}
        for form in self.forms:
            given = getattr(form, "cleaned_data", {})
            if (locale := given.get("locale")) and not given.get("DELETE"):
                if read_locale(locale) in seen:
                    form.add_error("locale", gettext("“%(name)s” is there twice") % {"name": locale})
                seen.add(read_locale(locale))


class TextInline(StackedInline):  # type: ignore[misc]
    model = TemplateText
    form = TextForm
    formset = TextFormSet
    extra = 0
    min_num = 1
    hide_title = True
    fields = (("locale", "subject"), "body")

    def get_fields(self, request: HttpRequest, obj: Any = None) -> Any:
        return [VERSION_FIELD, *self.fields] if self.has_change_permission(request, obj) else self.fields


@admin.register(Template)
class TemplateAdmin(HistoryAdmin, Retirable):
    form = TemplateForm
    inlines = (TextInline,)
    list_display = ("key", "content_type", "category", "locales", "beginning", "version")
    list_filter = (("category", ChoicesDropdownFilter), RetiredFilter)
    list_filter_submit = True
    search_fields = ("key", "content_type", "texts__body")
    fields = (("key", "content_type"), ("category", "version"), "tracks_links", "change_reason")
    readonly_fields = ("version",)
    fixed_fields = ("key",)
    actions_detail = ("send_test", "retire", "bring_back")
    change_form_outer_after_template = "ops/template_preview.html"

    class Media:
        js = ("scheduling/preview.js",)

    def get_queryset(self, request: HttpRequest) -> QuerySet[Template]:
        return super().get_queryset(request).prefetch_related("texts")  # type: ignore[no-any-return]

    def save_model(self, request: HttpRequest, obj: Template, form: Any, change: bool) -> None:
        """Leave the template to `save_related`, which stores it with its texts."""

    def save_related(self, request: HttpRequest, form: Any, formsets: Any, change: bool) -> None:
        with form.instance.store_as_one_version():
            super().save_model(request, form.instance, form, change)
            super().save_related(request, form, formsets, change)

    def in_use(self, row: Template) -> bool:
        of_variant = Q(variants__contains=[{"template": row.key}])
        nodes = Node.objects.filter(Q(template=row) | Q(canary_template=row) | of_variant)
        return row.touches.exists() or nodes.exists()

    @ops_display(description=_("languages"))
    def locales(self, row: Template) -> str:
        return ", ".join(text.locale for text in row.texts.all())

    @ops_display(description=_("text"))
    def beginning(self, row: Template) -> str:
        return summarize_text(row)

    @table_page("preview/", "view")
    def preview(self, request: HttpRequest) -> HttpResponse:
        """Render a text for a customer: a stored one, or for editors the unsaved one of the form."""
        if "text" in request.POST:
            row = get_object_or_404(TemplateText, pk=parse_number(request.POST["text"]) or 0)  # no row has 0
            return render_preview(request, TextSpec(row.locale, row.subject, row.body))
        if not self.has_change_permission(request):
            raise PermissionDenied
        given = (request.POST.get(name, "") for name in ("locale", "subject", "body"))
        return render_preview(request, TextSpec(*given))

    @row_action(_("Send a test"), icon="send", permission="change")
    def send_test(self, request: HttpRequest, row: Template) -> HttpResponse:
        """Send a test message, one attempt, and log it as a change of the template."""
        form = TestMessageForm(request.POST or None)
        outcome: Outcome | str | None = None
        body = ""
        if request.method == "POST" and form.is_valid():
            outcome, body = _send_test_message(row, form.cleaned_data)
            sent = isinstance(outcome, Delivered)
            words = "delivered" if sent else str(getattr(outcome, "reason", outcome))
            self.log_change(request, row, f"Test through {form.cleaned_data['channel']}: {words}")
        return self.page(
            request, "ops/send_test.html", gettext("Send a test of “%(what)s”") % {"what": row}, form=form,
            result=describe_outcome(outcome) if outcome is not None else None, body=body,
            back=self.url("change", row.pk), original=row,
        )  # fmt: skip
