"""Check stored templates against the template language: `manage.py check_templates`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any

from django.core.management.base import BaseCommand, CommandError, CommandParser

from scheduling.configuration import snapshot
from scheduling.configuration.validation import check_template_text
from scheduling.errors import InvalidInput
from scheduling.models import Template, Touch
from scheduling.models.touch import TouchState
from scheduling.policy.specs import EventSpec, TemplateSpec
from scheduling.templating import CannotRender, render_message

SAMPLES = 20  #: touches per template
MOST_SEARCHED = 10_000  #: of the latest delivered touches


class Command(BaseCommand):
    help = (
        "List stored message templates that are refused, and those that fail for a touch that was delivered."
        " Writes nothing. Exit status 1 if there are any."
    )

    def add_arguments(self, parser: CommandParser) -> None:
        parser.add_argument(
            "--samples", type=int, default=SAMPLES, help="delivered touches to render again, of each template; 0: none"
        )

    def handle(self, *, samples: int, **options: Any) -> None:
        rows = list(Template.objects.prefetch_related("texts"))
        found = [line for row in rows for line in _list_refused_texts(row)]
        if samples > 0:
            found += _list_failures({row.pk: snapshot.template_spec(row) for row in rows}, samples)
        for line in found:
            self.stdout.write(line)
        if found:
            raise CommandError(f"{len(found)} found in {len(rows)} templates")
        self.stdout.write(f"{len(rows)} templates are in order")


def _list_refused_texts(row: Template) -> Iterator[str]:
    for text in row.texts.all():
        try:
            check_template_text({"locale": text.locale, "subject": text.subject, "body": text.body})
        except InvalidInput as error:
            yield from (f"{row.key} [{text.locale}] {each.field}: {each.message}" for each in error.errors)


def _list_failures(templates: dict[int, TemplateSpec], samples: int) -> Iterator[str]:
    """Yield templates that do not render for a delivered touch, whose data is real.

    Touches of an earlier version of a template are skipped.
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
        try:
            render_message(template, touch.customer.spec(), event)
        except CannotRender as error:
            yield f"{template.key} does not render any more ({error}): touch {touch.task_id}"
