"""YAML and JSON that people write are read at a bounded cost, everywhere by the same reader."""

import json
import tracemalloc
from time import process_time

import pytest
from django.core.exceptions import ValidationError
from django.utils import translation
from hypothesis import given, settings
from hypothesis import strategies as st

from rpa_tasks.admin.flow import JsonField
from scheduling.admin.form_fields import DataField, LevelsField, SettingsField
from scheduling.admin.system.schedule import PeriodicTaskForm
from scheduling.configuration.file.apply import parse_document
from scheduling.strict_text import MAX_SIZE, InvalidText, read_json, read_yaml, write_yaml
from tests.support.tables import each_row

#: 218 bytes that a usual loader expands to 5.8 MB where they are written out.
BOMB = "a: &a [x,x,x,x,x,x,x,x,x]\n" + "".join(
    f"{key}: &{key} [{','.join([f'*{before}'] * 9)}]\n" for before, key in zip("abcd", "bcde", strict=True)
)


def test_document_keeps_words_and_times_as_text():
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
def test_document_ambiguous_yaml_is_refused(text, message):
    with pytest.raises(InvalidText) as error:
        parse_document(text)
    assert str(error.value) == message


def test_empty_document_has_no_sections():
    assert parse_document(b"") == {}
    assert parse_document(b"\xef\xbb\xbfa: 1") == {"a": 1}


@each_row(
    "text, message",
    [
        (BOMB, "line 2: aliases (*name) are not supported"),
        ("".join(f"k{each}: {each}\n" for each in range(60_000)), "must not be larger than 65536 bytes"),
        ("a: " + "[" * 30_000, "line 1: it is nested deeper than 40 levels"),
        ("a: \ud800", "line 1: contains U+D800"),
    ],
)
def test_settings_field_hostile_yaml_is_a_field_error(text, message):
    tracemalloc.start()
    began = process_time()
    with translation.override("en"), pytest.raises(ValidationError) as refused:
        SettingsField(strip=False).to_python(text)
    assert process_time() - began < 1
    assert tracemalloc.get_traced_memory()[1] < 8_000_000
    tracemalloc.stop()
    assert message in " ".join(refused.value.messages)


def test_read_yaml_many_keys_is_fast():
    """It took 14 s."""
    text = "".join(f"k{each}: {each}\n" for each in range(60_000))
    began = process_time()
    with pytest.raises(InvalidText, match="line 50000: there must not be more than 100000"):
        read_yaml(text)
    assert process_time() - began < 3


def test_settings_field_reads_what_it_writes():
    value = {"from": "a@example.com", "list": [1, {"b": "no"}], "yes": True, "text": "x: y\n# z", "<<": "m"}
    assert SettingsField().to_python(SettingsField().write(value)) == value
    twice = ["same"]
    assert "&" not in SettingsField().write({"a": twice, "b": twice})


def read_periodic_arguments(text):
    form = PeriodicTaskForm({"name": "x", "task": "x", "args": text, "kwargs": text})
    form.cleaned_data = {"args": text, "kwargs": text}
    with pytest.raises(ValidationError):
        form.clean_args()
    form.clean_kwargs()


@each_row("read", [DataField().to_python, JsonField().to_python, read_periodic_arguments])
@each_row(
    "text",
    [
        "[" * 100_000, '{"a":' * 60 + "1" + "}" * 60, '{"a": NaN}', '{"a": -Infinity}', '{"a": 1e999}',
        '{"a": ' + "9" * 5_000 + "}", '{"a": 1, "a": 2}', '{"a": "\\u0000"}', '{"\\ud800": 1}', '{"a": [" \\udc00 "]}',
        '{"a": "' + "x" * 300_000 + '"}', "{",
    ],
)  # fmt: skip
def test_hostile_json_is_a_field_error(read, text):
    with pytest.raises(ValidationError):
        read(text)


def test_json_field_of_an_object_takes_no_list():
    for field in (DataField(), JsonField()):
        with pytest.raises(ValidationError):
            field.to_python("[1]")


STORABLE = st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"]), max_size=20)
VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(10**17), 10**17)
    | st.floats(allow_nan=False, allow_infinity=False)
    | STORABLE,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(STORABLE, inner, max_size=3),
    max_leaves=15,
)


@settings(max_examples=30)
@given(VALUES)
def test_read_json_reads_any_storable_value(value):
    assert read_json(json.dumps(value)) == value


@settings(max_examples=30)
@given(st.dictionaries(STORABLE, VALUES, max_size=4))
def test_document_round_trips(document):
    assert parse_document(write_yaml(document).encode()) == document


def test_document_writes_chinese_unescaped():
    assert write_yaml({"name": "旗舰店"}) == "name: 旗舰店\n"
    assert write_yaml({"body": "第一行\n第二行"}) == "body: |-\n  第一行\n  第二行\n"


@given(st.text(st.sampled_from("[]{}:,-?&*!|>'\"%@`#~<= \n\tanulltrue0123.e\\x\ud800\0\x85"), max_size=60))
def test_read_any_text_raises_only_invalid_text(text):
    for read in (read_yaml, read_json):
        try:
            value = read(text)
        except InvalidText:
            continue
        assert read_yaml(write_yaml(value)) == value


def test_levels_field_parses_in_linear_time():
    """Each name was counted in all: 20,000 pairs took 6 s, and a form holds 200,000."""
    text = ", ".join(f"level-{each}=1h" for each in range(20_000))
    began = process_time()
    assert len(LevelsField().to_python(text)) == 20_000
    assert process_time() - began < 2
    with translation.override("en"), pytest.raises(ValidationError, match="“level-0” is there twice"):
        LevelsField().to_python(text + ", level-0=1h")
