"""An error is English in answers and logs, and a page prints it in its reader's language."""

import ast
import json

import pytest
from django.utils.translation import override

from config.environment import ROOT
from scheduling.admin.labels import translate_error
from scheduling.channels.base import InvalidSetting
from scheduling.error_text import ErrorText
from scheduling.errors import Conflict, InvalidInput, check_number, errors_within
from tests.support.tables import each_row

RANGE, RANGE_ZH = ErrorText("must be between %(least)s and %(most)s", least=0, most=100), "必须在 0 到 100 之间"
LINE = ErrorText("line %(line)s: %(what)s", line=3, what=RANGE)
#: Their errors are answers to programs, commands and configuration. No page shows them.
PROGRAMS = (
    "scheduling/api/", "scheduling/management/", "scheduling/receipts/", "scheduling/planning/ingest.py",
    "scheduling/operations/sample_data.py", "rpa_tasks/api/", "rpa_tasks/flow_sdk/", "sessions/api.py",
    "sessions/chat_hooks.py", "sessions/frames.py", "sessions/websocket/",
)  # fmt: skip
ERRORS = {
    "FieldError", "InvalidInput", "Conflict", "NotFound", "InvalidText",
    "InvalidValue", "InvalidSetting", "InvalidTemplate", "CannotRender", "UnreadableFile", "UnusableRow", "of",
}  # fmt: skip
COLLECTORS = {"add"}  #: with field and text


@each_row(
    "text, english, chinese",
    [
        (RANGE, "must be between 0 and 100", RANGE_ZH),
        (LINE, "line 3: must be between 0 and 100", f"第 3 行：{RANGE_ZH}"),
        (ErrorText("must be text"), "must be text", "必须是文本"),
        (ErrorText("written %d by 100% nobody"), "written %d by 100% nobody", "written %d by 100% nobody"),
        ("must be text", "must be text", "must be text"),  # of a library: only texts of ours are translated
        (ErrorText(""), "", ""),
    ],
)
def test_text_is_english_and_translated_on_a_page(text, english, chinese):
    stored = json.loads(json.dumps(ErrorText.dump(text)))
    for each in (text, ErrorText.load(stored)):
        with override("zh-hans"):
            assert (str(each), f"{each}", json.dumps(each)) == (english, english, json.dumps(english))
        with override("en"):
            assert translate_error(each) == english
    with override("zh-hans"):
        assert translate_error(text) == chinese


def test_exceptions_keep_their_texts():
    with pytest.raises(InvalidInput, match="share: must be between 0 and 100") as wrong, errors_within("share"):
        check_number(101, 0, 100)
    texts = [
        wrong.value.errors[0].message, str(Conflict(RANGE)), str(ValueError(RANGE)),
        InvalidSetting("share", RANGE).message,
    ]  # fmt: skip
    with override("zh-hans"):
        assert [translate_error(each) for each in texts] == [RANGE_ZH] * 4


def test_errors_that_pages_can_show_are_in_the_catalogues():
    """`_("…")` is: `test_every_own_string_is_in_a_catalogue` finds each."""
    paths = [path for name in ("scheduling", "rpa_tasks", "sessions") for path in sorted((ROOT / name).rglob("*.py"))]
    plain = [
        f"{place}:{line}"
        for path in paths
        if not (place := str(path.relative_to(ROOT))).startswith(PROGRAMS)
        for line in _find_plain_errors(path)
    ]
    assert plain == [], "write _(…), the ErrorText of scheduling.error_text"


def _find_plain_errors(path):
    for node in ast.walk(ast.parse(path.read_text("utf-8"))):
        if isinstance(node, ast.Call) and node.args:
            name = getattr(node.func, "id", getattr(node.func, "attr", ""))
            if (name in ERRORS or (name in COLLECTORS and len(node.args) == 2)) and _has_plain_words(node.args[-1]):
                yield node.lineno


def _has_plain_words(node):
    if isinstance(node, ast.IfExp):
        return _has_plain_words(node.body) or _has_plain_words(node.orelse)
    parts = node.values if isinstance(node, ast.JoinedStr) else [node]
    words = "".join(each.value for each in parts if isinstance(each, ast.Constant) and isinstance(each.value, str))
    return " " in words.strip() and any(each.isalpha() for each in words)
