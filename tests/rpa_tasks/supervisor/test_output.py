"""Lines, masks and the bounded log, for every way in which bytes may arrive."""

from __future__ import annotations

import itertools
import json
import os
import tempfile
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from rpa_tasks.supervisor import output
from rpa_tasks.supervisor.output import (
    LONGEST_LINE,
    Lines,
    Mask,
    OutputReader,
    RunLog,
    decode_tail,
    parse_message,
    progress_in,
)
from rpa_tasks.supervisor.protocol import Outbox, unpack_line

WORDS = st.sampled_from(
    [b"\n", b"{", b'{"progress": 1}', b'{"result": {}}', b"secret-1", b"secr", b"et-1", b"text ", b""]
)


def feed_all(lines: Lines, chunks: list[bytes]) -> tuple[bytes, list[bytes]]:
    told = [lines.feed(chunk) for chunk in chunks] + [lines.finish()]
    return b"".join(shown for shown, _, _ in told), [line for _, spoken, _ in told for line in spoken]


@given(st.lists(WORDS), st.lists(st.integers(0, 300)))
def test_output_lines_are_independent_of_chunks(words: list[bytes], cuts: list[int]) -> None:
    text = b"".join(words)
    places = sorted({0, len(text), *(cut for cut in cuts if cut < len(text))})
    chunks = [text[start:stop] for start, stop in itertools.pairwise(places)]
    shown, spoken = feed_all(Lines(Mask(["secret-1"])), chunks)
    lines = text.split(b"\n")
    expected = text.replace(b"secret-1", b"***") + (b"\n" if lines[-1] else b"")
    assert shown == expected
    keys = (b'"progress"', b'"result"')
    assert spoken == [line for line in lines if line.startswith(b"{") and any(key in line for key in keys)]


@example(65_996, 1_000)  # right where the first piece is cut
@given(st.integers(0, 3 * LONGEST_LINE), st.integers(1_000, LONGEST_LINE))
def test_secret_in_line_without_end_is_masked(at: int, size: int) -> None:
    text = b"a" * at + b"secret-1" + b"b" * (3 * LONGEST_LINE - at) + b'\n{"result": {}}\n'
    chunks = [text[start : start + size] for start in range(0, len(text), size)]
    shown, spoken = feed_all(Lines(Mask(["secret-1", "other-secret"])), chunks)
    assert shown == text.replace(b"secret-1", b"***")
    assert spoken == [b'{"result": {}}']


@given(st.lists(st.binary(min_size=1, max_size=90)))
def test_log_keeps_the_end_of_the_output(chunks: list[bytes]) -> None:
    with tempfile.TemporaryDirectory() as folder, mock.patch.object(output, "LOG_KEPT", 20):
        path = Path(folder) / "log"
        log = RunLog(str(path))
        for chunk in chunks:
            log.write(chunk)
        kept, text = path.read_bytes(), b"".join(chunks)
    assert text.endswith(kept)
    assert min(20, len(text)) <= len(kept) <= 40


def test_log_loses_only_output_during_full_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log = RunLog(str(tmp_path / "log"))
    log.write(b"before\n")
    with monkeypatch.context() as patch:
        patch.setattr("os.pwrite", lambda *_: (_ for _ in ()).throw(OSError(28, "No space left on device")))
        log.write(b"between\n")
    log.write(b"after\n")
    assert (tmp_path / "log").read_bytes() == b"before\nafter\n"


def test_tail_counts_characters_and_replaces_invalid_bytes() -> None:
    assert decode_tail("值".encode() * 10_000) == "值" * 8000
    assert decode_tail(b"\xff\0") == "��"
    assert Mask(["abcd", "abcdef"])(b"abcdef abcd") == b"*** ***", "the longer secret first"


@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.text(),
        lambda each: st.lists(each) | st.dictionaries(st.text(), each),
    )
)
def test_cleaned_value_can_be_stored(value: object) -> None:
    text = json.dumps(Mask(["secret-1"]).clean(value), ensure_ascii=False)
    text.encode()
    assert "\\u0000" not in text


def test_progress_is_limited_and_invalid_lines_are_none() -> None:
    lines = {
        '{"progress": 7}': (1.0, ""),
        '{"progress": -1, "message": 5}': (0.0, ""),
        '{"progress": 0.5, "message": "' + "x" * 300 + '"}': (0.5, "x" * 200),
        '{"progress": true}': None,
        '{"progress": "0.5"}': None,
        '{"progress": NaN}': None,
        '{"progress": 1e999}': None,
        '{"progress": ' + "9" * 309 + "}": None,  # a float has no room for it
        '{"progress": ' + "9" * 5_000 + "}": None,
        '{"progress": 0.5': None,
        '["progress"]': None,
        '{"progress": ' + "[" * 20_000: None,
    }
    found = {line: progress_in(parse_message(line.encode(), Mask([])) or {}) for line in lines}
    expected = {line: {"progress": told[0], "message": told[1]} if told else None for line, told in lines.items()}
    assert found == expected


def test_failing_line_does_not_stop_output_reader(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not even an unexpected one: the command would end with its supervisor, without a reason."""
    readable, writable = os.pipe()
    outbox = Outbox(os.open(tmp_path / "told", os.O_WRONLY | os.O_CREAT))
    reader = OutputReader(str(tmp_path / "log"), [], outbox)
    reader.attach(readable, os.open("/dev/null", os.O_RDONLY))

    def breaks(value: Any) -> None:
        raise TypeError(value)

    monkeypatch.setattr("rpa_tasks.supervisor.output.progress_in", breaks)
    os.write(writable, b'{"progress": 1}\n{"result": {"n": 1}}\n')
    os.close(writable)
    reader.finish()
    os.close(outbox.descriptor)

    assert unpack_line((tmp_path / "told").read_bytes()) == {"result": {"n": 1}}
    assert reader.error == ""
