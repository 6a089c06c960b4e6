"""The cast of the back office: who may see, who may act, who may edit."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from html import unescape
from typing import Any

import pytest
from django.contrib.messages import get_messages
from django.test import Client
from django.urls import reverse
from pytest_django import Settings

from tests.scheduling.core.receivers import ScriptedReceiver
from tests.support.matrix import MatrixBuilder, RecordEvent
from tests.support.undrawn import read_context, read_refusal

Url = Callable[..., str]
FillForm = Callable[..., dict[str, Any]]
SaveForm = Callable[..., None]
FormErrors = Callable[..., list[dict[str, str]]]
CheckFormErrors = Callable[..., None]


def read_messages(answer: Any) -> str:
    return " ".join(str(message) for message in get_messages(answer.wsgi_request))


def interrupt(monkeypatch: pytest.MonkeyPatch, form: Any, change: Callable[[], Any]) -> None:
    """Change rows after the view has read its row and before its form locks the row."""
    validate = form.full_clean

    def full_clean(bound: Any) -> None:
        if bound.is_bound:
            change()
        validate(bound)

    monkeypatch.setattr(form, "full_clean", full_clean)


@pytest.fixture(autouse=True)
def clear_hourly_caches() -> Iterator[None]:
    """They hold figures of earlier tests."""
    from scheduling.monitoring.statistics import HourlyCache

    HourlyCache.clear_all()
    yield
    HourlyCache.clear_all()


@pytest.fixture
def admin_url() -> Url:
    def admin_url(name: str, *args: Any) -> str:
        return reverse(f"admin:scheduling_{name}", args=args)

    return admin_url


@pytest.fixture
def fill_form(editor: Client) -> FillForm:
    """Return what a browser would send for this form, with changes."""

    def fill_form(url: str, client: Client = editor, **changes: Any) -> dict[str, Any]:
        context = read_context(client, url)
        forms = [context["adminform"].form]
        for inline in context["inline_admin_formsets"]:
            forms += [inline.formset.management_form, *inline.formset.forms]
        data: dict[str, Any] = {}
        for form in forms:
            for field in form:
                value = None if field.field.disabled else field.value()
                if value is not None and value is not False:
                    data[field.html_name] = value
        return {key: value for key, value in {**data, **changes}.items() if value is not None}

    return fill_form


@pytest.fixture
def save_form(editor: Client, fill_form: FillForm) -> SaveForm:
    """Send the form of a page with changes as an editor, and expect that it is saved."""

    def save_form(url: str, **changes: Any) -> None:
        answer = editor.post(url, fill_form(url, **changes))
        assert answer.status_code == 302, answer.context["adminform"].form.errors

    return save_form


@pytest.fixture
def check_form_errors(list_form_errors: FormErrors) -> CheckFormErrors:
    """Send the form of a page with each of the changes, and expect one error each: at this field, with this text."""

    def check_form_errors(url: str, *rows: Any) -> None:
        errors = list_form_errors(url, *(changes for changes, *_ in rows))
        assert [list(each) for each in errors] == [[field] for _, field, *_ in rows]
        told = zip(errors, rows, strict=True)
        assert [each for each, (_, field, *texts) in told if any(text not in each[field] for text in texts)] == []

    return check_form_errors


@pytest.fixture
def list_form_errors(editor: Client, fill_form: FillForm) -> FormErrors:
    """Read a form once, send it with each of the changes, and return the errors of each by field."""

    def list_form_errors(url: str, *changes: dict[str, Any]) -> list[dict[str, str]]:
        filled = fill_form(url)
        found = []
        for change in changes:
            sent = {key: value for key, value in (filled | change).items() if value is not None}
            form = read_refusal(editor, url, sent)["adminform"].form
            found.append({name: unescape(str(errors)) for name, errors in form.errors.items()})
        return found

    return list_form_errors


@pytest.fixture
def receiver(settings: Settings) -> Iterator[ScriptedReceiver]:
    settings.AFTERTOUCH_ALLOWED_PRIVATE_HOSTS = ["127.0.0.1"]
    with ScriptedReceiver() as server:
        yield server


@pytest.fixture
def administrator(as_member: Callable[[str], Client]) -> Client:
    return as_member("admin")


@pytest.fixture
def failed(matrix: MatrixBuilder, record_event: RecordEvent) -> Callable[..., Any]:
    """A touch that failed because its text wants data that the event did not bring; its failed task."""
    from scheduling.delivery.pipeline import deliver_touches
    from scheduling.models import FailedTask, Node

    def failed(user: str = "ann", *, unknown: bool = False) -> Any:
        if not Node.objects.filter(key="broken").exists():
            template = matrix.template("broken", body="{{ event.data.order_no }}")
            matrix.node("broken", trigger="order.paid", template=template)
        receipt = record_event("order.paid", user)
        deliver_touches(receipt.task_ids)
        row = FailedTask.objects.get(task_id=receipt.task_ids[0])
        if unknown:
            row.failure = "unknown"
            row.save()
        return row

    return failed
