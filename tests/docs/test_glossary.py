"""The glossary defines the model classes, and the product uses each of its terms."""

import ast
import re
from pathlib import Path

from config.environment import ROOT
from tests.docs.pages import table
from tests.docs.test_layout import PRODUCT

GLOSSARY = ROOT / "docs/reference/glossary.md"
MODELS = ("scheduling/models", "rpa_tasks/models", "sessions/models.py")


def read_rows():
    text = GLOSSARY.read_text("utf-8")
    return [row for heading in re.findall(r"^## .+$", text, re.MULTILINE) for row in table(text, heading)]


def list_model_classes():
    for name in MODELS:
        for path in [ROOT / name] if name.endswith(".py") else sorted((ROOT / name).rglob("*.py")):
            for node in ast.parse(path.read_text("utf-8")).body:
                if isinstance(node, ast.ClassDef) and not any("Choices" in ast.unparse(base) for base in node.bases):
                    yield node.name


def fold(text):
    return re.sub(r"[^a-z]", "", text.lower())


def test_glossary_defines_each_model_class_in_both_languages():
    rows = read_rows()
    terms = {fold(term) for term, _, _ in rows}
    named = {name for row in rows for name in re.findall(r"`(\w+)`", row[2])}
    classes = list(list_model_classes())
    assert len(classes) > 50
    assert [name for name in classes if fold(name) not in terms and name not in named] == []
    assert [term for term, chinese, meaning in rows if not (re.search(r"[\u4e00-\u9fff]", chinese) and meaning)] == []


def test_glossary_term_is_used_outside_the_glossary():
    """As words, or as a name in code. An abstract base counts as used by the classes that derive from it."""
    pages = [*(path for path in (ROOT / "docs").rglob("*.md") if path != GLOSSARY), ROOT / "README.md"]
    modules = [path for app in PRODUCT for path in sorted((ROOT / app).rglob("*.py")) if "migrations" not in path.parts]
    templates = sorted((ROOT / "templates").rglob("*.html"))
    text = "\n".join(Path(path).read_text("utf-8") for path in (*pages, *modules, *templates))

    def is_used(term, meaning):
        words = [re.escape(word) for word in re.findall(r"\w+", re.sub(r"\(.*\)", "", term))]
        names = [re.escape(name) + r"\b" for name in re.findall(r"`(\w+)`", meaning)]
        spellings = "|".join([r"[-_'\s]*".join(words), *names])
        return re.search(rf"\b(?:{spellings})", text, re.IGNORECASE) is not None

    assert [term for term, _, meaning in read_rows() if not is_used(term, meaning)] == []


def test_glossary_defines_a_term_once():
    headings = re.split(r"^## .+$", GLOSSARY.read_text("utf-8"), flags=re.MULTILINE)[1:]
    for section in headings:
        terms = re.findall(r"^\| ([^|]+) \|", section, re.MULTILINE)
        assert sorted(set(terms)) == sorted(terms)
