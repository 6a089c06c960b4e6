"""The sections `silence_policies` and `campaigns` of the configuration file."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from scheduling.configuration.file.matrix import list_window_calendars
from scheduling.configuration.file.notation import SEND_WINDOWS, list_of, text
from scheduling.configuration.file.section import Key, Listed, Reference, Section
from scheduling.error_text import ErrorText as _
from scheduling.models import Calendar
from sessions.frames import TAG_LENGTH
from sessions.models import Campaign, SilencePolicy
from sessions.policy import CUSTOMER, own_tags

if TYPE_CHECKING:
    from scheduling.configuration.file.apply import Plan


class SilencePolicies(Section):
    """Silence policies. The policy `default` applies to sessions without another one; a file may omit it.

    `tag: vip` is short for `key: vip`. Without `tags` the key is the tag.
    """

    name = "silence_policies"
    noun = "silence policy"
    model = SilencePolicy
    refers = (Calendar,)
    required = frozenset({"threshold"})
    notations = {"tags": list_of(text(TAG_LENGTH)), "hours": SEND_WINDOWS}

    def read_entry(
        self, entry: dict[str, Any], position: int, path: str, earlier: Mapping[Key, Listed], plan: Plan
    ) -> Listed | None:
        if "tag" in entry and "key" not in entry:
            entry = {("key" if name == "tag" else name): value for name, value in entry.items()}
        return super().read_entry(entry, position, path, earlier, plan)

    def own_defaults(self, values: Mapping[str, Any], position: int, stored: Any = None) -> dict[str, Any]:
        return {"tags": own_tags(values["key"], None)} if "key" in values else {}

    def check_among(self, one: Listed, plan: Plan) -> None:
        one.row.tags = own_tags(one.row.key, one.row.tags)
        # A guide and an answer policy may have the same tags: both apply.
        kind = one.row.after == CUSTOMER, tuple(one.row.tags)
        first = plan.once("tags", dict).setdefault(kind, one.path)
        if first != one.path:
            plan.problem(f"{one.path}.tags", _("are those of %(other)s", other=first))

    def list_references(self, row: Any) -> Iterator[Reference]:
        yield from list_window_calendars("hours", row.hours)

    def may_be_unlisted(self, row: Any) -> bool:
        return bool(row.is_default)

    def list_rows(self, given: Any = None) -> Iterable[Any]:
        return sorted(SilencePolicy.objects.all(), key=lambda row: (not row.is_default, row.key))


class Campaigns(Section):
    name = "campaigns"
    noun = "campaign"
    model = Campaign
    required = frozenset({"threshold"})
