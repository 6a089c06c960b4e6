"""Every message of the product, Unfold, celery-beat, simple-history and Django has a Chinese translation."""

import ast
import gettext
import json
import re
import shutil
import subprocess
import sys
from collections import defaultdict
from importlib.util import find_spec
from pathlib import Path

import pytest
from django.contrib import admin
from django.urls import reverse
from django.utils import translation
from django.utils.translation.template import templatize

from config.environment import ROOT
from tests.language.catalogue import CATALOGUES, PACKAGES, SCRIPTS, THIRD_PARTY, entries
from tests.support.tables import each_row

SHOWN = (
    "unfold", "django_celery_beat", "simple_history", "django.contrib.admin", "django.contrib.auth",
    "django.contrib.contenttypes", "django.forms", "django.core.validators", "django.db.models.fields", "django.views",
)  # fmt: skip
SINGULAR = ("_", "gettext", "gettext_lazy", "gettext_noop")
PLURAL = ("ngettext", "ngettext_lazy")
#: Names, not words.
THE_SAME = {"IPv4", "IPv6", "URL", "%(class_name)s %(instance)s", "HSL", "RGB"}

each_file = each_row("path", [*CATALOGUES, THIRD_PARTY, SCRIPTS])
each_catalogue = each_row("path", CATALOGUES)


@each_file
def test_catalogue_entries_are_unique_and_reviewed_and_keep_their_placeholders(path):
    def names(text):
        return set(re.findall(r"%\(\w+\)s|\{\w*\}|%[sd]", text))

    found = entries(path)
    words = [entry.word for entry in found]
    assert sorted({word for word in words if words.count(word) > 1}) == []
    for entry in found:
        assert (entry.fuzzy, entry.obsolete) == (False, False), entry.word
        assert entry.translations, entry.word
        known = names(entry.said["msgid"] + entry.said.get("msgid_plural", ""))
        for translated in entry.translations:
            assert translated, entry.word
            assert names(translated) <= known, entry.word


def test_word_of_two_catalogues_has_one_translation():
    """Django merges the catalogues: the first app's translation would stand in the pages of all."""
    found = defaultdict(set)
    for entry in (entry for path in [*CATALOGUES, THIRD_PARTY] for entry in entries(path)):
        found[entry.word].add(tuple(entry.translations))
    differing = {word: translations for word, translations in found.items() if len(translations) > 1}
    assert differing == {}, "translate it alike, or give it a context (pgettext)"


@each_file
def test_compiled_catalogue_matches_source(path):
    """Not by the files' times: a checkout gives both the same."""
    with path.with_suffix(".mo").open("rb") as file:
        compiled = gettext.GNUTranslations(file)
    for entry in entries(path):
        context, singular = entry.word
        key = f"{context}\4{singular}" if context else singular
        if plural := entry.said.get("msgid_plural"):
            found = compiled.ngettext(key, plural, 1)
        else:
            found = compiled.gettext(key)
        assert found == entry.translations[0], f"{entry.word}: run manage.py compilemessages"


@pytest.fixture(scope="module")
def source_strings(tmp_path_factory):
    """What makemessages finds in a copy of our code and our pages."""
    if not shutil.which("xgettext"):
        pytest.skip("missing service: gettext (xgettext)")
    copy = tmp_path_factory.mktemp("words")
    for folder in (*PACKAGES, "templates"):
        shutil.copytree(ROOT / folder, copy / folder, ignore=shutil.ignore_patterns("locale", "__pycache__", "static"))
    (copy / "locale").mkdir()
    done = subprocess.run(
        [sys.executable, "-m", "django", "makemessages", "-l", "zh_Hans", "--no-location"],
        cwd=copy, env={"PATH": "/usr/bin:/bin"}, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return {entry.word for entry in entries(copy / "locale/zh_Hans/LC_MESSAGES/django.po")}


def test_every_own_string_is_in_a_catalogue(source_strings):
    known = {entry.word for path in CATALOGUES for entry in entries(path)}
    assert sorted(source_strings - known) == [], "run makemessages, translate, run compilemessages"


@each_catalogue
def test_catalogue_has_no_unused_entries(path, source_strings):
    assert sorted({entry.word for entry in entries(path)} - source_strings) == [], "take it out"


def test_admin_script_strings_are_translated(client):
    """Those of the calendar, and of choosing several."""
    client.cookies["django_language"] = "zh-hans"
    script = client.get(reverse("admin:jsi18n")).content.decode()
    found = re.search(r"const newcatalog = (\{.*?\});?\n", script, re.DOTALL)
    assert found
    known = json.loads(found[1])
    english = Path(admin.__file__).parent / "locale/en/LC_MESSAGES/djangojs.po"
    missing = []
    for entry in entries(english):
        context, word = entry.word
        said = known.get(f"{context}\4{word}" if context else word, word)
        if said == word:
            missing.append(entry.word)
    assert missing == [], f"add it to {SCRIPTS.name}"


def test_library_strings_are_translated():
    with translation.override("zh-hans"):
        missing = {
            word
            for module in SHOWN
            for word, plural in _read_words(module)
            if re.search(r"[A-Za-z]{2}", word) and word not in THE_SAME
            and word == (translation.ngettext(word, plural, 1) if plural else translation.gettext(word))
        }  # fmt: skip
    assert sorted(missing) == [], f"add it to {THIRD_PARTY.relative_to(ROOT)}"


def _read_words(module):
    """Each word in its code and its pages with its plural, or with an empty text."""
    origin = find_spec(module)
    assert origin is not None
    assert origin.origin is not None
    root = Path(origin.origin)
    files = [*root.parent.rglob("*.py"), *root.parent.rglob("*.html")] if root.name == "__init__.py" else [root]
    return [
        each
        for path in files
        if "migrations" not in path.parts
        for each in (_in_python(path) if path.suffix == ".py" else _in_page(path))
    ]


def _in_python(path):
    for node in ast.walk(ast.parse(path.read_text("utf-8"))):
        if isinstance(node, ast.Call):
            name = getattr(node.func, "id", getattr(node.func, "attr", ""))
            words = [each.value for each in node.args if isinstance(each, ast.Constant) and isinstance(each.value, str)]
            if name in SINGULAR and words:
                yield words[0], ""
            elif name in PLURAL and len(words) >= 2:
                yield words[0], words[1]


def _in_page(path):
    text = r"u?('(?:[^'\\]|\\.)*'|\"(?:[^\"\\]|\\.)*\")"
    for call, first, second, tag in re.findall(
        rf"\b(n?gettext)\({text}(?:, ?{text})?|_\({text}\)", templatize(path.read_text("utf-8"))
    ):
        yield ast.literal_eval(first or tag), ast.literal_eval(second) if call == "ngettext" and second else ""
