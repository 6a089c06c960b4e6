"""Pages of communities and their targets. Secrets can be written and are never displayed."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from django.contrib import admin
from django.db.models import QuerySet
from django.db.models.functions import Length
from django.http import HttpRequest
from django.utils.translation import gettext
from django.utils.translation import gettext_lazy as _

from scheduling.admin.base import CheckedForm, ops_display
from scheduling.admin.matrix.channel import KIND_LABELS, MASK, SEALED, SecretField, get_readable_secrets, merge_secrets
from scheduling.admin.retirement import Retirable, RetiredFilter
from scheduling.channels.base import channel_kinds
from scheduling.configuration.validation import channel_kind_for_target, check_community
from scheduling.models import ChannelConfig, Community
from scheduling.models.encrypted import Sealed


def channels_by_key() -> dict[str, str]:
    return dict(ChannelConfig.objects.filter(retired_at=None).values_list("key", "kind"))


def list_known_communities() -> QuerySet[Community]:
    """Return communities with a name or a target, to choose from.

    All others are stored when they are first counted: as many as there are conversations.
    """
    known = Community.objects.alias(size=Length("targets")).exclude(name="", size=0)
    return known.filter(retired_at=None)


def list_targets(stored: Mapping[str, Any]) -> list[tuple[str, list[str]]]:
    """Return the possible targets of a community: by kind, by channel, and the stored ones."""
    kinds = channels_by_key()
    named = [kind for kind, each in channel_kinds().items() if not each.address_key and each.secret_fields]
    named += [key for key, kind in kinds.items() if kind in named and key not in named]
    named += [name for name in stored if name not in named]
    return [
        (name, sorted(getattr(kind, "target_fields", kind.secret_fields), reverse=True))
        for name in named
        if (kind := channel_kind_for_target(name, kinds))
    ]


class CommunityForm(CheckedForm):
    written_columns = ("targets",)

    class Meta:
        model = Community
        fields: ClassVar[Any] = ("chat_id", "name")

    def check(self, values: Mapping[str, Any], /) -> None:
        check_community(values, channels_by_key())

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.targets: Mapping[str, Any] = self.instance.targets or {}  #: the value after the form is clean
        self.stored = get_readable_secrets(self.targets)
        for place, names in list_targets(self.stored):
            for name in names:
                self.fields[f"target_{place}_{name}"] = SecretField(name, bool(self.stored.get(place, {}).get(name)))

    def values(self) -> dict[str, Any]:
        cleaned = super().values()
        targets = dict(self.stored)
        for place, names in list_targets(self.stored):
            given = {name: cleaned.get(f"target_{place}_{name}", "").strip() for name in names}
            before = self.stored.get(place, {})
            others = {name: value for name, value in before.items() if name not in names}
            targets[place] = {**others, **merge_secrets(before, given)}
        cleaned["targets"] = {name: target for name, target in targets.items() if target}
        if cleaned["targets"] or not isinstance(self.instance.targets, Sealed):
            self.targets = cleaned["targets"]
        return cleaned

    def find_error_field(self, path: str) -> str | None:
        root, _dot, rest = path.partition(".")
        if root == "targets":
            place, _dot, name = rest.rpartition(".")
            for field in (f"target_{place}_{name}", f"target_{rest}_url"):
                if field in self.fields:
                    return field
        return super().find_error_field(path)


@admin.register(Community)
class CommunityAdmin(Retirable):
    form = CommunityForm
    list_display = ("chat_id", "name", "shown_targets")
    list_filter = (RetiredFilter,)
    list_filter_submit = False
    search_fields = ("chat_id", "name")
    fixed_fields = ("chat_id",)

    def layout(self, request: HttpRequest, obj: Any) -> list[Any]:
        stored = get_readable_secrets(obj.targets) if obj else {}
        sealed = obj is not None and isinstance(obj.targets, Sealed)
        return [
            (None, {"fields": ("chat_id", "name"), "description": SEALED if sealed else None}),
            *(
                (
                    KIND_LABELS.get(place) or gettext("channel %s") % place,
                    {
                        "fields": [tuple(f"target_{place}_{name}" for name in names)],
                        "classes": [] if place in stored else ["collapse"],
                    },
                )
                for place, names in list_targets(stored)
            ),
        ]

    def in_use(self, row: Community) -> bool:
        """Always in use: events and touches refer to a community by its chat id."""
        return True

    @ops_display(description=_("targets"))
    def shown_targets(self, row: Community) -> str:
        if isinstance(row.targets, Sealed):
            return gettext("Secrets cannot be decrypted here")
        return ", ".join(f"{KIND_LABELS.get(name, name)} {MASK}" for name in row.targets) or "–"
