"""Every word of ours is in the catalogue, and every word of the catalogue is Chinese."""

from __future__ import annotations

import ast
import gettext
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from django.conf import settings
from django.utils.translation.template import templatize

CATALOGUES = ("scheduling/locale", "rpa_tasks/locale", "sessions/locale", "config/locale")
APPS = ("scheduling", "rpa_tasks", "sessions")
CALLS = {"_", "gettext", "gettext_lazy", "gettext_noop", "ngettext", "ngettext_lazy"}
CALLS_WITH_CONTEXT = {"pgettext", "pgettext_lazy"}
ROOT: Path = settings.BASE_DIR


def entries(folder: str) -> list[str]:
    text = (ROOT / folder / "zh_Hans" / "LC_MESSAGES" / "django.po").read_text("utf-8")
    return [block for block in text.split("\n\n") if re.search(r"^msgid ", block, re.MULTILINE)][1:]


def known() -> set[str]:
    found: set[str] = set()
    for folder in CATALOGUES:
        path = ROOT / folder / "zh_Hans" / "LC_MESSAGES" / "django.mo"
        with path.open("rb") as file:
            catalogue = gettext.GNUTranslations(file)._catalog  # type: ignore[attr-defined]
        found |= {key if isinstance(key, str) else key[0] for key in catalogue}
    return found


def spoken_by_python() -> Iterator[tuple[str, str]]:
    for path in sorted(path for app in APPS for path in (ROOT / app).rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.args:
                words = node.args[: 1 if node.func.id in CALLS else 2 if node.func.id in CALLS_WITH_CONTEXT else 0]
                said = [word.value for word in words if isinstance(word, ast.Constant) and isinstance(word.value, str)]
                if said:
                    yield str(path.relative_to(ROOT)), "\x04".join(said)


def spoken_by_templates() -> Iterator[tuple[str, str]]:
    for folder in ("templates", "scheduling/templates"):
        for path in sorted((ROOT / folder).rglob("*.html")):
            source = templatize(path.read_text("utf-8"))
            for found in re.finditer(
                r"n?gettext\(u?('(?:[^'\\]|\\.)*'|\"(?:[^\"\\]|\\.)*\")|_\((\"[^\"]*\")\)", source
            ):
                yield str(path.relative_to(ROOT)), ast.literal_eval(found[1] or found[2])


@pytest.mark.parametrize("folder", CATALOGUES)
def test_every_entry_has_a_translation_that_somebody_stands_for(folder: str) -> None:
    for entry in entries(folder):
        assert "fuzzy" not in entry, entry
        assert re.search(r'^msgstr(\[0\])? (""\n)?".+"', entry, re.MULTILINE), entry


def test_every_word_of_ours_is_in_the_catalogue() -> None:
    words = known()
    missing = sorted({pair for pair in [*spoken_by_python(), *spoken_by_templates()] if pair[1] not in words})
    assert missing == [], "run makemessages, translate, run compilemessages"


@pytest.mark.parametrize("folder", CATALOGUES)
def test_translations_keep_their_placeholders(folder: str) -> None:
    for entry in entries(folder):
        original, _, translated = entry.partition("msgstr")
        names = set(re.findall(r"%\(\w+\)s|\{\w+\}", translated))
        assert names <= set(re.findall(r"%\(\w+\)s|\{\w+\}", original)), entry
