"""Read and write section `communities`: chats, their names and the targets of their messages."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from django.db.models.functions import Length

from scheduling.channels.kinds import list_secret_names
from scheduling.configuration import validation
from scheduling.configuration.file.base import Difference
from scheduling.configuration.file.draft import Draft
from scheduling.configuration.file.rows import RowSection
from scheduling.configuration.file.schema import Anything, Field, MapOf, Text
from scheduling.configuration.file.secrets import (
    explain_missing_secret,
    mask_secrets,
    restore_secrets,
    setting_differences,
    unreadable_difference,
)
from scheduling.models import ChannelConfig, Community
from scheduling.models.encrypted import Sealed


def find_secret_names(name: str, kinds: Mapping[str, str], target: Mapping[str, Any]) -> Collection[str]:
    """Return the secret names of a target: of all kinds, because a later channel may give its name another kind."""
    known = validation.channel_kind_for_target(name, kinds) is not None
    return list_secret_names() if known else target.keys()


class Communities(RowSection):
    name = "communities"
    noun = "community"
    tables = (Community,)
    model = Community
    identity = ("chat_id",)
    fields = (
        Field("chat_id", Text(200)),
        Field("name", Text(200, empty=True), default=""),
        Field("targets", MapOf(Anything()), default={}),
    )

    def claimed(self, given: Any) -> set[str]:
        return set()

    def stored(self) -> list[Any]:
        """Return the rows with a name or targets. Others are as many as conversations are counted."""
        return list(Community.objects.alias(size=Length("targets")).exclude(name="", size=0))

    def row_of(self, key: tuple[Any, ...], draft: Draft) -> Any:
        return super().row_of(key, draft) or draft.once("listed communities", lambda: self._listed(draft)).get(key)

    def _listed(self, draft: Draft) -> dict[tuple[Any, ...], Any]:
        given = draft.document.get(self.name)
        entries = given if isinstance(given, list) else []
        chats = {str(entry.get("chat_id")) for entry in entries if isinstance(entry, dict)}
        rows = Community.objects.filter(chat_id__in=chats)
        return {self.key_of(row): row for row in rows}

    def read_entry(self, entry: dict[str, Any], position: int, path: str, draft: Draft) -> dict[str, Any]:
        return super().read_entry(self._unmask(entry, path, draft), position, path, draft)

    def _unmask(self, entry: dict[str, Any], path: str, draft: Draft) -> dict[str, Any]:
        targets = entry.get("targets")
        if not isinstance(targets, dict):
            return entry
        row = self.row_of((str(entry.get("chat_id")),), draft)
        stored = row.targets if row is not None else {}
        kinds = self.kinds(draft)
        whole = {}
        for name, target in targets.items():
            if not isinstance(target, dict):
                whole[name] = target
                continue
            secret = find_secret_names(name, kinds, target)
            known = stored if isinstance(stored, Sealed) else stored.get(name, {})
            whole[name], missing = restore_secrets(target, known, secret)
            for field in missing:
                draft.problem(f"{path}.targets.{name}.{field}", explain_missing_secret(known))
        return entry | {"targets": whole}

    def kinds(self, draft: Draft) -> dict[str, str]:
        """Return the kind of each channel, in the file or stored, because targets may outlive a channel."""
        kinds: dict[str, str] = draft.once("channel kinds", lambda: self._kinds(draft))
        return kinds

    def _kinds(self, draft: Draft) -> dict[str, str]:
        kinds = {row.key: row.kind for row in draft.rows("channels")}
        given = draft.document.get("channels")
        for entry in given if isinstance(given, list) else []:
            if isinstance(entry, dict):
                kinds[str(entry.get("key"))] = str(entry.get("kind"))
        return kinds

    def check(self, values: Mapping[str, Any], draft: Draft) -> None:
        validation.check_community(values, self.kinds(draft))

    def judge(self, values: Mapping[str, Any], path: str, draft: Draft) -> None:
        if not draft.has_problem(f"{path}.targets"):
            super().judge(values, path, draft)

    def may_be_unlisted(self, row: Any) -> bool:
        """Return whether no person wrote this row.

        The first count of a chat creates a row without name and targets. The file need not list it.
        """
        return not row.name and not row.targets

    def differences(self, before: Mapping[str, Any], after: Mapping[str, Any]) -> Sequence[Difference]:
        was, will = before["targets"], after.get("targets", {})
        found = list(super().differences({**before, "targets": will}, after))
        if isinstance(was, Sealed):
            return [*found, unreadable_difference("targets")]
        if was != will:
            kinds = dict(ChannelConfig.objects.values_list("key", "kind"))
            for name in sorted(was.keys() | will.keys()):
                old, new = was.get(name, {}), will.get(name, {})
                secret = find_secret_names(name, kinds, old | new)
                found += setting_differences(f"targets.{name}.", old, new, secret)
                if (name in was) != (name in will) and not (old or new):
                    found.append(Difference(f"targets.{name}", was.get(name), will.get(name)))
        return found

    def export(self, *, with_secrets: bool) -> Any:
        entries = super().export(with_secrets=with_secrets)
        kinds = dict(ChannelConfig.objects.values_list("key", "kind"))
        for entry in entries if not with_secrets else ():
            for name, target in entry.get("targets", {}).items():
                entry["targets"][name] = mask_secrets(target, find_secret_names(name, kinds, target))
        return entries
