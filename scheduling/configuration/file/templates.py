"""Read and write section `templates`. Entries with one key and several locales are one template."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from django.db.models import F

from scheduling.configuration import validation
from scheduling.configuration.file.base import Change, Difference, Stamp
from scheduling.configuration.file.draft import Draft
from scheduling.configuration.file.rows import RowSection, Wanted
from scheduling.configuration.file.schema import FLAG, KEY, Choice, Field, Text, read_fields
from scheduling.error_text import ErrorText as _
from scheduling.errors import InvalidInput
from scheduling.models import Category, Template, TemplateText
from scheduling.templating.engine import MAX_SOURCE
from scheduling.templating.rendering import read_locale

LOCALE = "zh-hans"


class Templates(RowSection):
    name = "templates"
    noun = "template"
    tables = (Template, TemplateText)
    model = Template
    fields = (
        Field("key", KEY),
        Field("content_type", Text(64)),
        Field("category", Choice(Category.values), default=Category.MARKETING.value),
        Field("tracks_links", FLAG, default=True),
    )
    text_fields = (
        Field("locale", Text(20), default=LOCALE),
        Field("subject", Text(200, empty=True), default=""),
        # `body: null` is a template that has no text yet.
        Field("body", Text(MAX_SOURCE), default=None),
    )

    def read(self, given: Any, draft: Draft) -> list[Wanted]:
        wanted: dict[str, Wanted] = {}
        for position, path, entry in self.entries(given, draft):
            values = self._read_text(entry, position, path, draft)
            if "key" not in values:
                continue
            own = {field.name: values[field.name] for field in self.fields if field.name in values}
            template = wanted.setdefault(values["key"], Wanted(path, (values["key"],), own | {"texts": {}}))
            for column in ("content_type", "category", "tracks_links"):
                if (
                    column in entry
                    and column in values
                    and values[column] != template.values.get(column, values[column])
                ):
                    draft.problem(f"{path}.{column}", _("must be the same as at %(path)s", path=template.path))
            self._add_text(template.values["texts"], values, path, draft)
        return list(wanted.values())

    def _read_text(self, entry: dict[str, Any], position: int, path: str, draft: Draft) -> dict[str, Any]:
        values = read_fields(entry, (*self.fields, *self.text_fields), path, draft.problems)
        if "body" not in entry:
            draft.problem(f"{path}.body", _("is missing"))
        self.fill(values, position, path, draft)
        self.judge(values, path, draft)
        return values

    def _add_text(self, texts: dict[str, Any], values: Mapping[str, Any], path: str, draft: Draft) -> None:
        locale = values.get("locale", LOCALE)
        if read_locale(locale) in map(read_locale, texts):
            draft.problem(
                f"{path}.locale", _("“%(locale)s” is listed already for “%(key)s”", locale=locale, key=values["key"])
            )
        elif values.get("body") is not None:
            texts[locale] = {"subject": values.get("subject", ""), "body": values["body"]}

    def standard(self, values: Mapping[str, Any], position: int) -> dict[str, Any]:
        return super().standard(values, position) | {"locale": LOCALE, "subject": ""}

    def fill(self, values: dict[str, Any], position: int, path: str, draft: Draft) -> None:
        super().fill(values, position, path, draft)
        if not draft.has_problem(f"{path}.locale"):
            values.setdefault("locale", LOCALE)

    def check(self, values: Mapping[str, Any], draft: Draft) -> None:
        validation.check_template(values)

    def judge(self, values: Mapping[str, Any], path: str, draft: Draft) -> None:
        super().judge(values, path, draft)
        try:
            validation.check_template_text({name: value for name, value in values.items() if value is not None})
        except InvalidInput as error:
            for each in error.errors:
                draft.problem(f"{path}.{each.field}", each.message)

    def stored(self) -> list[Any]:
        return list(Template.objects.prefetch_related("texts"))

    def values_of(self, row: Any) -> dict[str, Any]:
        texts = {text.locale: {"subject": text.subject, "body": text.body} for text in row.texts.all()}
        return super().values_of(row) | {"texts": texts}

    def differences(self, before: Mapping[str, Any], after: Mapping[str, Any]) -> Sequence[Difference]:
        found = list(super().differences(before, after))
        for locale in sorted(before["texts"].keys() | after["texts"].keys()):
            was, will = before["texts"].get(locale, {}), after["texts"].get(locale, {})
            found += [
                Difference(f"{name}[{locale}]", was.get(name), will.get(name))
                for name in ("subject", "body")
                if was.get(name) != will.get(name) and (was.get(name) or will.get(name))
            ]
        return found

    def store(self, change: Change, stamp: Stamp) -> None:
        """Write the template before its texts: saving a text increments the template's version."""
        if change.row is None or change.verb in ("retired", "restored") or self._own_differ(change):
            super().store(change, stamp)
        if change.verb != "retired":
            template = change.row or Template.objects.get(key=change.values["key"])
            before = change.before.get("texts", {})
            self._store_texts(template, change.values["texts"], stamp)
            # Saving a changed text increments the version; adding or removing one does not.
            if change.row is not None and before.keys() != change.values["texts"].keys():
                Template.objects.filter(pk=template.pk).update(version=F("version") + 1)

    def _own_differ(self, change: Change) -> bool:
        return any(change.before[field.name] != change.values[field.name] for field in self.fields)

    def _store_texts(self, template: Template, texts: Mapping[str, Any], stamp: Stamp) -> None:
        stored = {text.locale: text for text in template.texts.all()}
        for locale, wanted in texts.items():
            text = stored.pop(locale, None)
            if text is None or (text.subject, text.body) != (wanted["subject"], wanted["body"]):
                text = text or TemplateText(template=template, locale=locale)
                text.subject, text.body = wanted["subject"], wanted["body"]
                stamp.on(text)
                text.save()
        for text in stored.values():
            stamp.on(text)
            text.delete()

    def entries_of(self, values: Mapping[str, Any], position: int, with_secrets: bool) -> list[dict[str, Any]]:
        own = self.written(self.fields, values, {})
        texts = [{"locale": locale, **text} for locale, text in sorted(values["texts"].items())]
        # The usual keys first, the long body last.
        return [own | self.written(self.text_fields, text, {"subject": ""}) for text in texts] or [own | {"body": None}]
