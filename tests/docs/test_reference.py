"""The reference agrees with the code, is complete, and is in plain words."""

import re
from datetime import timedelta
from functools import cache

import pytest
from pydantic import ValidationError

from config.environment import ROOT, Environment
from config.reference import build_pages
from rpa_tasks.outcomes import DEFAULT_DELAYS, DEFAULT_EXIT_CODES
from rpa_tasks.supervisor.command import PLACEHOLDERS, RUN_MEMBERS
from scheduling.configuration.file.sections import sections
from tests.docs.pages import anchors, table
from tests.docs.test_layout import PRODUCT

SETTINGS = ROOT / "docs/reference/settings.md"
CONFIG_FILE = ROOT / "docs/reference/config-file.md"
API = ROOT / "docs/reference/api.md"


@cache
def built_pages():
    return build_pages()


@pytest.mark.parametrize("path", [SETTINGS, CONFIG_FILE, API], ids=lambda path: path.name)
def test_reference_tables_match_the_code(path):
    assert path.read_text("utf-8") == built_pages()[path], "run python -m config.reference, say what new rows are for"


@pytest.mark.parametrize("path", [SETTINGS, CONFIG_FILE, API], ids=lambda path: path.name)
def test_reference_rows_have_a_description(path):
    assert re.findall(r"^\| (\S+) \|.*\| \|$", path.read_text("utf-8"), re.MULTILINE) == []


def test_settings_page_lists_directly_read_variables():
    """Environment variables read elsewhere: the state directory's own name, and those that flows get."""
    told = SETTINGS.read_text("utf-8")
    read = re.compile(r"environ(?:\.get|\.setdefault)?[\[(]\s*\"([A-Z_]+)\"")
    found = {
        name
        for package in PRODUCT
        for path in (ROOT / package).rglob("*.py")
        for name in read.findall(path.read_text("utf-8"))
    }
    assert [name for name in sorted(found) if f"`{name}`" not in told] == []


def test_duration_setting_accepts_documented_formats(monkeypatch):
    for value in ("04:00:00", "P14D", "PT4H"):
        monkeypatch.setenv("AFTERTOUCH_RPA_EVIDENCE_KEPT", value)
        assert Environment().aftertouch_rpa_evidence_kept >= timedelta(hours=4)
    for value in ("00:00:01", "3600"):
        monkeypatch.setenv("AFTERTOUCH_RPA_EVIDENCE_KEPT", value)
        with pytest.raises(ValidationError, match="aftertouch_rpa_evidence_kept"):
            Environment()


def test_config_page_has_a_heading_per_section():
    assert set(sections()) <= anchors(CONFIG_FILE.read_text("utf-8"))


def test_page_of_rpa_programs_names_every_placeholder_member_and_code():
    page = (ROOT / "docs/how-to/use-your-own-rpa-program.md").read_text("utf-8")
    named = set(re.findall(r"`\{(\w+)\}`", "".join(row[0] for row in table(page, "## 1. What your program receives"))))
    assert named == set(PLACEHOLDERS)
    assert all(f"`{member}`" in page for member in RUN_MEMBERS)
    ends = {row[1].strip("`"): row[0] for row in table(page, "## How a run ends")}
    assert {name: tuple(map(int, ends[name].split(", "))) for name in DEFAULT_EXIT_CODES} == DEFAULT_EXIT_CODES
    assert "after {:.0f}, {:.0f} and {:.0f} s".format(*DEFAULT_DELAYS) in page
