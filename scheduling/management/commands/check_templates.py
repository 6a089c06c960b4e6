"""Check stored templates against the template language: `manage.py check_templates`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any

from django.core.management.base import BaseCommand, CommandError, CommandParser
from jinja2 import StrictUndefined
from jinja2.sandbox import ImmutableSandboxedEnvironment

from scheduling.configuration import snapshot
from scheduling.errors import InvalidInput
from scheduling.models import Template, Touch
from scheduling.models.touch import TouchState
from scheduling.policy.specs import CustomerSpec, EventSpec, TemplateSpec
from scheduling.templating.rendering import check_text, choose_text, render_message, template_variables
from scheduling.templating.values import CannotRender

SAMPLES = 20  #: touches per template
MOST_SEARCHED = 10_000  #: of the latest delivered touches
#: The engine before the template language was bounded.
_JINJA = ImmutableSandboxedEnvironment(undefined=StrictUndefined, autoescape=False)


class Command(BaseCommand):
    help = (
        "List stored message templates that are refused, and those that fail or read differently for a touch that"
        " was delivered. Writes nothing. Exit status 1 if there are any."
    )

    def add_arguments(self, parser: CommandParser) -> None:
        parser.add_argument(
            "--samples", type=int, default=SAMPLES, help="delivered touches to render again, of each template; 0: none"
        )

    def handle(self, *, samples: int, **options: Any) -> None:
        rows = list(Template.objects.prefetch_related("texts"))
        found = [line for row in rows for line in _list_refused_texts(row)]
        if samples > 0:
            found += _list_differences({row.pk: snapshot.template_spec(row) for row in rows}, samples)
        for line in found:
            self.stdout.write(line)
        if found:
            raise CommandError(f"{len(found)} found in {len(rows)} templates")
        self.stdout.write(f"{len(rows)} templates are in order")


def _list_refused_texts(row: Template) -> Iterator[str]:
    for text in row.texts.all():
        for field in ("subject", "body"):
            try:
                check_text(getattr(text, field), field=field)
            except InvalidInput as error:
                yield f"{row.key} [{text.locale}] {error}"


def _list_differences(templates: dict[int, TemplateSpec], samples: int) -> Iterator[str]:
    """Yield templates whose text for a delivered touch differs from that of the earlier engine.

    Touches hold real data. Those of an earlier version of a template are skipped.
    """
    seen: Counter[int] = Counter()
    delivered = Touch.objects.filter(state=TouchState.DELIVERED, template__isnull=False)
    for touch in delivered.select_related("event", "customer").order_by("-task_id")[:MOST_SEARCHED].iterator():
        template = templates[touch.template_id]  # type: ignore[index]
        if touch.template_version != template.version or seen[template.id] >= samples:
            continue
        seen[template.id] += 1
        row = touch.event
        event = EventSpec(
            row.id, row.source, row.event_id, row.type, row.occurred_at, row.user_id, row.chat_id, row.data
        )
        difference = _compare_rendering(template, touch.customer.spec(), event)
        if difference:
            yield f"{template.key} {difference}: touch {touch.task_id}"


def _compare_rendering(template: TemplateSpec, customer: CustomerSpec, event: EventSpec) -> str:
    try:
        subject, body, _ = render_message(template, customer, event)
    except CannotRender as error:
        return f"does not render any more ({error})"
    # A text that renders within the limits also renders in the engine without limits.
    text, names = choose_text(template, customer.locale), template_variables(customer, event)
    before = tuple(_JINJA.from_string(each).render(names) for each in (text.subject, text.body))
    return "renders differently" if before != (subject, body) else ""
