"""The text of a file: YAML without its surprises."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from scheduling.configuration.file.apply import parse_document
from scheduling.strict_text import MAX_SIZE, InvalidText, write_yaml
from tests.support.tables import each_row

TEXTS = st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"]), max_size=40)
PLAIN = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(10**17), 10**17)
    | st.floats(allow_nan=False, allow_infinity=False)
    | TEXTS,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(TEXTS, inner, max_size=4),
    max_leaves=20,
)


def test_document_keeps_words_and_times_as_text() -> None:
    given = parse_document(b"a: no\nb: 22:00\nc: 2024-01-01\nd: 010\ne: on\nf: 1_000\n")
    assert given == {"a": "no", "b": "22:00", "c": "2024-01-01", "d": "010", "e": "on", "f": "1_000"}


@each_row(
    "text, message",
    [
        (b"a: 1\nb: 2\na: 3\n", "line 3: “a” is given twice"),
        (b"a: &x [1]\nb: *x\n", "line 2: aliases (*name) are not supported"),
        (b"a: !!python/object:os.system x\n", "line 1: tags (!!python/object:os.system) are not supported"),
        (b"<<: {a: 1}\n", "line 1: merge keys (<<) are not supported"),
        (b"a: \x01\n", "line 1: control characters are not allowed"),
        (b"1: a\n", "line 1: keys must be text; put it in quotes"),
        (b'a: "x\\0y"\n', "line 1: contains U+0000"),
        (b'a: "\\ud800"\n', "line 1: found invalid Unicode character escape code"),
        (b"a: 1.0e+999\n", "line 1: this number is too large; write it as text"),
        (b"a: [1\n", "line 2: did not find expected ',' or ']'"),
        (b"- a\n", "the file must be a mapping of sections"),
        (b"a: 1\n---\nb: 2\n", "line 2: but found another document"),
        (b"a: \xff\n", "the file must be UTF-8"),
        (b"a: " + b"[" * 5000, "line 1: it is nested deeper than 40 levels"),
        (b"a:\n" + b"- x\n" * 100_000, "line 99999: there must not be more than 100000 keys and values"),
        (b"#" * (MAX_SIZE + 1), f"the file must not be larger than {MAX_SIZE} bytes"),
    ],
)  # fmt: skip
def test_document_ambiguous_yaml_is_refused(text: bytes, message: str) -> None:
    with pytest.raises(InvalidText) as error:
        parse_document(text)
    assert str(error.value) == message


def test_empty_document_has_no_sections() -> None:
    assert parse_document(b"") == {}
    assert parse_document(b"\xef\xbb\xbfa: 1") == {"a": 1}


@settings(max_examples=30)
@given(st.dictionaries(TEXTS, PLAIN, max_size=4))
def test_document_round_trips(document: dict[str, object]) -> None:
    assert parse_document(write_yaml(document).encode()) == document


def test_document_writes_chinese_unescaped() -> None:
    assert write_yaml({"name": "旗舰店"}) == "name: 旗舰店\n"
    assert write_yaml({"body": "第一行\n第二行"}) == "body: |-\n  第一行\n  第二行\n"
