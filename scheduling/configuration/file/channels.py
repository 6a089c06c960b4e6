"""Read and write section `channels`. Keys outside the table are settings of the channel's kind."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import Any, ClassVar

from django.db.models import Model

from scheduling.channels.kinds import redirects_secret
from scheduling.configuration import validation
from scheduling.configuration.file.base import KEPT, Difference
from scheduling.configuration.file.draft import Draft
from scheduling.configuration.file.rows import RowSection
from scheduling.configuration.file.schema import DURATION, FLAG, KEY, Field, ListOf, Seconds, Text, Whole
from scheduling.configuration.file.secrets import (
    explain_missing_secret,
    find_channel_kind,
    mask_secrets,
    restore_secrets,
    secret_fields,
    setting_differences,
    unreadable_difference,
)
from scheduling.error_text import ErrorText as _
from scheduling.models import ChannelConfig
from scheduling.models.encrypted import Sealed


class Channels(RowSection):
    name = "channels"
    noun = "channel"
    tables: ClassVar[tuple[type[Model], ...]] = (ChannelConfig,)
    model: ClassVar[type[Model]] = ChannelConfig
    free = True
    fields: ClassVar[tuple[Field, ...]] = (
        Field("key", KEY),
        Field("name", Text(100, empty=True), default=""),
        Field("kind", Text(40)),
        Field("idempotent", FLAG, default=False),
        Field("timeout", DURATION, default=timedelta(seconds=10)),
        Field("retry", ListOf(Seconds()), column="retry_delays", default=[]),
        Field("daily_limit", Whole(), default=None),
        Field("monthly_limit", Whole(), default=None),
    )

    def defaults(self, values: Mapping[str, Any], position: int) -> dict[str, Any]:
        kind = find_channel_kind(values.get("kind", ""))
        return {"idempotent": kind.default_idempotent} if kind else {}

    def read_entry(self, entry: dict[str, Any], position: int, path: str, draft: Draft) -> dict[str, Any]:
        own = {field.path for field in self.fields}
        values = super().read_entry({key: item for key, item in entry.items() if key in own}, position, path, draft)
        config = {key: item for key, item in entry.items() if key not in own}
        stored = self._stored_config(values, draft)
        values["config"], missing = restore_secrets(
            config, stored, secret_fields(find_channel_kind(values.get("kind", "")), config)
        )
        for name in missing:
            draft.problem(f"{path}.{name}", explain_missing_secret(stored))
        kept = config.get("secret") == KEPT and "secret" not in missing
        if kept and redirects_secret(values.get("kind", ""), stored, values["config"]):
            draft.problem(f"{path}.secret", _("must be entered again for another host"))
        if not missing:
            self.judge({name: values[name] for name in ("kind", "config") if name in values}, path, draft)
        return values

    def _stored_config(self, values: Mapping[str, Any], draft: Draft) -> Mapping[str, Any]:
        row = self.row_of((values.get("key"),), draft)
        return row.config if row is not None and row.kind == values.get("kind") else {}

    def check(self, values: Mapping[str, Any], draft: Draft) -> None:
        validation.check_channel(values)

    def path_of(self, column: str) -> str:
        return super().path_of(column.removeprefix("config."))

    def values_of(self, row: Any) -> dict[str, Any]:
        return super().values_of(row) | {"config": row.config}

    def differences(self, before: Mapping[str, Any], after: Mapping[str, Any]) -> Sequence[Difference]:
        found = list(super().differences(before, after))
        if isinstance(before["config"], Sealed):
            return [*found, unreadable_difference("config")]
        kinds = [find_channel_kind(each.get("kind", "")) for each in (before, after)]
        secret = {
            name
            for kind, each in zip(kinds, (before, after), strict=True)
            for name in secret_fields(kind, each["config"])
        }
        return [*found, *setting_differences("", before["config"], after["config"], secret)]

    def put(self, row: Any, values: Mapping[str, Any]) -> None:
        super().put(row, values)
        row.config = values["config"]

    def entries_of(self, values: Mapping[str, Any], position: int, with_secrets: bool) -> list[dict[str, Any]]:
        (entry,) = super().entries_of(values, position, with_secrets)
        config = values["config"]
        secret = () if with_secrets else secret_fields(find_channel_kind(values.get("kind", "")), config)
        return [entry | mask_secrets(config, secret)]
