"""The sections `silence_policies` and `campaigns` of the configuration file, and the validation of their rows."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from scheduling.configuration.file.notation import SEND_WINDOWS
from scheduling.configuration.file.section import Key, Listed, Plan, Section
from scheduling.error_text import ErrorText as _
from scheduling.errors import ErrorCollector, InvalidInput
from scheduling.models.versioned import rules_of
from scheduling.policy.send_times import check_windows
from sessions.frames import MOST_TAGS, has_control_characters
from sessions.models import Campaign, SilencePolicy
from sessions.policy import CUSTOMER, DEFAULT_KEY, own_tags


@rules_of(SilencePolicy)
def check_policy(values: Mapping[str, Any], found: ErrorCollector) -> None:
    check_tags(values, found)
    check_windows(values.get("hours") or [], found, "hours")


def check_tags(values: Mapping[str, Any], found: ErrorCollector) -> None:
    tags = values.get("tags") or []
    if len(tags) > MOST_TAGS:
        found.add("tags", _("must be at most %(most)s tags", most=MOST_TAGS))
    if any(has_control_characters(str(tag)) for tag in tags):
        found.add("tags", _("must not have control characters"))
    if values.get("key") == DEFAULT_KEY and tags:
        found.add("tags", _("must be empty: the default policy applies to sessions without another one"))


@rules_of(Campaign)
def check_campaign(values: Mapping[str, Any], found: ErrorCollector) -> None:
    starts_at, ends_at = values.get("starts_at"), values.get("ends_at")
    if starts_at and ends_at and ends_at <= starts_at:
        found.add("ends_at", _("must be later than starts_at"))


class SilencePolicies(Section):
    """Silence policies. The policy `default` applies to sessions without another one; a file may omit it.

    `tag: vip` is short for `key: vip`. Without `tags` the key is the tag.
    """

    name = "silence_policies"
    noun = "silence policy"
    model = SilencePolicy
    required = frozenset({"threshold"})
    notations = {"hours": SEND_WINDOWS}

    def read_entry(
        self, entry: dict[str, Any], position: int, path: str, earlier: Mapping[Key, Listed], plan: Plan
    ) -> Listed:
        if "tag" in entry and "key" not in entry:
            entry = {("key" if name == "tag" else name): value for name, value in entry.items()}
        return super().read_entry(entry, position, path, earlier, plan)

    def own_defaults(self, values: Mapping[str, Any], position: int, stored: Any = None) -> dict[str, Any]:
        return {"tags": own_tags(values["key"], None)} if "key" in values else {}

    def check_among(self, rows: Sequence[Listed], plan: Plan) -> None:
        seen: dict[tuple[Any, ...], str] = {}
        for one in rows:
            one.row.tags = own_tags(one.row.key, one.row.tags)
            # A guide and an answer policy may have the same tags: both apply.
            first = seen.setdefault((one.row.after == CUSTOMER, *one.row.tags), one.path)
            if first != one.path:
                raise InvalidInput.of(f"{one.path}.tags", _("are those of %(other)s", other=first))

    def may_be_unlisted(self, row: Any) -> bool:
        return bool(row.is_default)

    def list_rows(self, given: Any = None) -> Iterable[Any]:
        return sorted(SilencePolicy.objects.all(), key=lambda row: (not row.is_default, row.key))


class Campaigns(Section):
    name = "campaigns"
    noun = "campaign"
    model = Campaign
    required = frozenset({"threshold"})
