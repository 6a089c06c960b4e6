"""Read and check the text that an operator edits before a failed touch is published again.

The text is stored in the difference of the failed task. `delivery.edited_texts` reads it when the touch is judged.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any
from uuid import UUID

from scheduling.configuration import snapshot
from scheduling.delivery.due_batch import load_edited_texts
from scheduling.delivery.routing import find_preview_escape
from scheduling.error_text import ErrorText as _
from scheduling.errors import ErrorCollector
from scheduling.models import FailedTask, Touch
from scheduling.policy.specs import EventSpec, template_for
from scheduling.strict_text import find_unstorable_text
from scheduling.templating.engine import MAX_SOURCE
from scheduling.templating.library import CannotRender
from scheduling.templating.rendering import choose_text, render_message

MAX_SUBJECT = 200  #: characters, as in a template
MEMBERS = ("subject", "body")
_VARIABLE = re.compile(r"\{\{.*?\}\}|\{%.*?%\}", re.DOTALL)


def read_touch_text(row: FailedTask) -> dict[str, str] | None:
    """Return the subject and body that a retry would send; None if the touch has been deleted.

    A text that cannot be rendered is returned with its variables. An operator replaces them by words.
    """
    assert row.task_id is not None
    touch = Touch.objects.select_related("event", "node", "customer").filter(pk=str(row.task_id)).first()
    if touch is None:
        return None
    for attempt in reversed(touch.attempts):
        if attempt.body:
            return {"subject": attempt.subject, "body": attempt.body}
    return read_edited_text(touch.root_id) or _render_touch(touch)


def read_edited_text(root_id: UUID) -> dict[str, str] | None:
    """Return the edited text of a delivery key; None if no operator edited it."""
    found = load_edited_texts([root_id]).get(root_id)
    return {"subject": found.subject, "body": found.body} if found else None


def check_touch_text(given: Mapping[str, Any]) -> dict[str, str]:
    """Return the edited subject and body.

    Raises:
        InvalidInput: a member is unknown, is no text, is too long, cannot be stored or still has a variable.
    """
    found = ErrorCollector()
    for name in sorted(set(given) - set(MEMBERS)):
        found.add(f"payload.{name}"[:100], _("is no member of a message; “subject” and “body” are"))
    text = {"subject": given.get("subject", ""), "body": given.get("body", "")}
    for name, most in (("subject", MAX_SUBJECT), ("body", MAX_SOURCE)):
        if problem := _find_problem(text[name], most):
            found.add(f"payload.{name}", problem)
    if text["body"] == "":
        found.add("payload.body", _("must be given"))
    found.raise_if_any()
    return text


def _find_problem(value: Any, most: int) -> str:
    if not isinstance(value, str):
        return _("must be a text")
    if len(value) > most:
        return _("must not be longer than %(most)s characters", most=most)
    if problem := find_unstorable_text(value):
        return problem
    variable = _VARIABLE.search(value)
    return _("still has the variable %(variable)s; write its value", variable=variable[0][:60]) if variable else ""


def _render_touch(touch: Touch) -> dict[str, str]:
    config = snapshot.current()
    template = config.templates.get(touch.template_id) if touch.template_id else None
    node = config.nodes[touch.node_id]
    if template is None:
        template = template_for(node, touch.chat_id, touch.customer.user_id, None)
    event = EventSpec(
        touch.event_id, touch.event.source, touch.event.event_id, touch.event.type, touch.event.occurred_at,
        touch.customer.user_id, touch.chat_id, touch.event.data,
    )  # fmt: skip
    customer = touch.customer.spec()
    try:
        subject, body, _locale = render_message(template, customer, event, find_preview_escape(node.channel))
    except CannotRender:
        try:
            text = choose_text(template, customer.locale)
        except CannotRender:
            return {"subject": "", "body": ""}
        subject, body = text.subject, text.body
    return {"subject": subject, "body": body}
