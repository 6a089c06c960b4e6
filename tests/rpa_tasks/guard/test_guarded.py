"""What a command says, and what is made of it: real commands under a real guard."""

from __future__ import annotations

import json
import os
import select
import stat
import sys
import time
from pathlib import Path

import psutil
import pytest

from rpa_tasks.outcomes import CommandResult, ExitCause
from rpa_tasks.supervisor.client import FlowResult, Progress, Started, SupervisedCommand
from tests.rpa_tasks.guard.house import PATIENCE, House, hear, hear_out, wait_for_start

#: The most memory that the guard of this command ever had, told by the command.
TELL_MEMORY = """
import json, os
status = open(f"/proc/{os.getppid()}/status").read()
print()
print(json.dumps({"result": {"guard_mb": int(status.split("VmHWM:")[1].split()[0]) / 1024}}), flush=True)
"""


def test_a_command_that_works_tells_its_start_its_progress_its_result_and_its_end(house: House) -> None:
    script = """
        echo hello
        echo '{"progress": 0.4, "message": "page 2"}'
        echo '{"result": {"read": 12}}'
        echo careful >&2
    """
    heard, ending = hear_out(house.shell(script))
    assert isinstance(heard[0], Started)
    assert Progress(0.4, "page 2") in heard
    assert FlowResult({"read": 12}) in heard
    assert ending == CommandResult(ExitCause.EXITED, exit=0, result={"read": 12}, started=True, tail=ending.tail)
    assert "hello\n" in ending.tail
    assert "careful\n" in house.log.read_text()


def test_the_exit_status_and_a_signal_are_told_apart(house: House) -> None:
    _, ending = hear_out(house.shell("exit 65"))
    assert (ending.ended, ending.exit, ending.signal) == (ExitCause.EXITED, 65, None)
    _, ending = hear_out(house.shell("kill -SEGV $$"))
    assert (ending.ended, ending.exit, ending.signal) == (ExitCause.EXITED, None, 11)


def test_the_end_is_told_again_when_asked_again(house: House) -> None:
    with SupervisedCommand(house.order("/bin/true")) as guarded:
        _, ending = hear(guarded)
        assert guarded.next_event(0) is ending
    assert guarded.close() is ending


def test_a_command_sees_exactly_the_environment_of_its_order(house: House) -> None:
    script = "import json, os, sys; print(json.dumps({'result': {'env': dict(os.environ), 'cwd': os.getcwd()}}))"
    _, ending = hear_out(house.python(script, env=house.env | {"LC_ALL": "C.UTF-8", "NAME": "值=1"}))
    assert ending.result == {"env": house.env | {"LC_ALL": "C.UTF-8", "NAME": "值=1"}, "cwd": str(house.folder)}


def test_a_command_reads_nothing_and_inherits_nothing(house: House) -> None:
    readable, writable = os.pipe()
    os.set_inheritable(readable, True)
    try:
        script = """
import os, sys
print(sorted(os.listdir("/proc/self/fd"))[:-1], repr(sys.stdin.read()), os.getsid(0) == os.getpid())
"""
        _, ending = hear_out(house.python(script))
    finally:
        os.close(readable)
        os.close(writable)
    assert ending.tail == "['0', '1', '2'] '' True\n"


def test_a_command_ignores_no_signal_that_a_worker_ignores(house: House) -> None:
    _, ending = hear_out(house.python("print(next(line for line in open('/proc/self/status') if 'SigIgn' in line))"))
    ignored = int(ending.tail.split()[1], 16) & (1 << 31) - 1  # the C library keeps 32 and 33 from everybody's hands
    python_itself = 1 << 12 | 1 << 24  # SIGPIPE and SIGXFSZ, ignored by every Python
    assert ignored == python_itself


@pytest.mark.parametrize(
    ("name", "mode", "content", "reason"),
    [
        ("missing", 0, b"", "command_missing"),
        ("plain", 0o644, b"#!/bin/sh\n", "command_not_executable"),
        ("garbage", 0o755, b"\x00\x01\x02", "command_not_executable"),
        ("interpreter", 0o755, b"#!/no/such/interpreter\n", "command_missing"),
    ],
)
def test_what_cannot_be_started_has_a_reason(house: House, name: str, mode: int, content: bytes, reason: str) -> None:
    program = house.folder / name
    if mode:
        program.write_bytes(content)
        program.chmod(mode)
    heard, ending = hear_out(house.order(str(program)))
    assert heard == []
    assert (ending.ended, ending.error, ending.started) == (ExitCause.NOT_STARTED, reason, False)
    assert str(program) in ending.tail


def test_a_program_without_a_path_is_looked_for_where_its_own_environment_says(house: House) -> None:
    program = house.folder / "rpa-cli"
    program.write_text("#!/bin/sh\nexit 3\n")
    program.chmod(stat.S_IRWXU)
    assert hear_out(house.order("rpa-cli"))[1].error == "command_missing"
    assert hear_out(house.order("rpa-cli", env=house.env | {"PATH": str(house.folder)}))[1].exit == 3


def test_words_that_are_too_long_and_a_missing_directory_are_named(house: House) -> None:
    assert hear_out(house.order("/bin/echo", "x" * 200_000))[1].error == "arguments_too_long"
    assert hear_out(house.order("/bin/true", cwd=str(house.folder / "gone")))[1].error == "directory_missing"


def test_a_guard_that_cannot_be_started_is_an_ending_too(house: House, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", str(house.folder / "gone"))
    with SupervisedCommand(house.order("/bin/true")) as guarded:
        ending = guarded.next_event(0)
    assert isinstance(ending, CommandResult)
    assert (ending.ended, ending.error) == (ExitCause.NOT_STARTED, "guard_not_started")


def test_a_stack_trace_with_exit_status_0_has_no_result(house: House) -> None:
    _, ending = hear_out(house.python("import traceback\ntry: 1/0\nexcept Exception: traceback.print_exc()"))
    assert (ending.exit, ending.result) == (0, None)
    assert "ZeroDivisionError" in ending.tail


def test_progress_comes_twice_a_second_at_most_and_the_last_is_never_lost(house: House) -> None:
    script = 'import time\nfor n in range(1001): print(\'{"progress": %f, "message": "%d"}\' % (n / 1000, n))'
    began = time.monotonic()
    heard, _ = hear_out(house.python(script))
    told = [event for event in heard if isinstance(event, Progress)]
    assert told[-1] == Progress(1.0, "1000")
    assert len(told) <= 3 + 2 * (time.monotonic() - began)


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ('{"progress": 7}', Progress(1.0, "")),
        ('{"progress": -1, "message": 5}', Progress(0.0, "")),
        ('{"progress": 0.5, "message": "' + "x" * 300 + '"}', Progress(0.5, "x" * 200)),
        ('{"progress": true}', None),
        ('{"progress": "0.5"}', None),
        ('{"progress": NaN}', None),
        ('{"progress": 1e999}', None),
        ('{"progress": ' + "9" * 309 + "}", None),  # a float has no room for it
        ('{"progress": ' + "9" * 5_000 + "}", None),
        ('{"progress": 0.5', None),
        ('["progress"]', None),
        ('{"progress": ' + "[" * 20_000, None),
    ],
)
def test_only_what_is_meant_as_progress_is_progress(house: House, line: str, expected: Progress | None) -> None:
    heard, ending = hear_out(house.shell(f"cat <<'END'\n{line}\nEND"))
    assert heard[1:] == ([expected] if expected else [])
    assert ending.exit == 0


def test_a_json_line_on_stderr_is_nothing_but_output(house: House) -> None:
    heard, ending = hear_out(house.shell("""echo '{"result": {}}' >&2"""))
    assert len(heard) == 1
    assert ending.result is None


def test_the_first_result_counts_and_needs_no_newline(house: House) -> None:
    heard, ending = hear_out(house.shell("""printf '{"result": {"n": 1}}\\n{"result": {"n": 2}}'"""))
    assert [event for event in heard if isinstance(event, FlowResult)] == [FlowResult({"n": 1})]
    assert ending.result == {"n": 1}
    assert hear_out(house.shell("""printf '{"result": {"n": 3}}'"""))[1].result == {"n": 3}


@pytest.mark.parametrize(
    ("value", "error"),
    [
        ('"a string"', "result_not_readable"),
        ('{"n": NaN}', "result_not_readable"),
        ('{"n": 1', "result_not_readable"),
        ('{"n": "' + "x" * 70_000 + '"}', "result_too_long"),
        ('{"n": "' + "x" * 700_000 + '"}', "result_too_long"),
    ],
)
def test_a_result_that_cannot_be_taken_is_named(house: House, value: str, error: str) -> None:
    (house.folder / "said").write_text('{"result": ' + value + "}\n")
    heard, ending = hear_out(house.shell("cat said"))
    assert not any(isinstance(event, FlowResult) for event in heard)
    assert (ending.result, ending.error) == (None, error)


def test_what_postgresql_refuses_is_replaced(house: House) -> None:
    script = r"""printf '{"result": {"a\\u0000": ["\\ud800", 1]}}\nplain \377\000 bytes\n'"""
    _, ending = hear_out(house.shell(script))
    assert ending.result == {"a�": ["?", 1]}
    assert ending.tail.endswith("plain �� bytes\n")


def test_secrets_are_masked_in_log_tail_result_and_progress(house: House) -> None:
    script = """
        printf 'the pass'; printf 'word-1 is out\\n'
        echo '{"progress": 0.5, "message": "with password-1"}'
        echo '{"result": {"password-1": ["key password-1"]}}'
        printf 'line one\\nline two' >&2
    """
    heard, ending = hear_out(house.shell(script, mask=["password-1", "line one\nline two", "is", ""]))
    told = json.dumps([repr(event) for event in [*heard, ending]]) + house.log.read_text()
    assert "password-1" not in told
    assert "line one" not in told
    assert "the *** is out" in ending.tail
    assert ending.result == {"***": ["key ***"]}


def test_nothing_secret_is_in_the_command_line_of_the_guard(house: House) -> None:
    order = house.shell("sleep 100", env=house.env | {"TOKEN": "password-1"}, mask=["password-1"])
    with SupervisedCommand(order) as guarded:
        parent = int(Path(f"/proc/{wait_for_start(guarded)}/stat").read_text().rsplit(")", 1)[1].split()[1])
        shown = Path(f"/proc/{parent}/cmdline").read_bytes() + Path(f"/proc/{parent}/environ").read_bytes()
        assert b"supervisor/main.py" in shown
        assert b"password-1" not in shown
        assert "password-1" not in repr(order)


def test_output_of_100_mb_costs_little_memory_and_disk_and_holds_nothing_up(house: House) -> None:
    script = """
import os
line = b"x" * 99 + b"\\n"
os.write(1, b"first line\\n")
for _ in range(1000):
    os.write(1, line * 1000)
"""
    began = time.monotonic()
    _, ending = hear_out(house.python(script + TELL_MEMORY + "print('last line')", log_limit=1_000_000))
    assert ending.result is not None
    assert ending.result["guard_mb"] < 30
    assert time.monotonic() - began < 30
    log = house.log.read_bytes()
    assert len(log) <= 1_000_000
    assert log.startswith(b"first line\n")
    assert log.endswith(b"last line\n")
    assert ending.dropped + len(log) == pytest.approx(100_000_000, abs=200)
    assert len(ending.tail) == 8_000


def test_a_line_without_end_is_passed_on_in_pieces(house: House) -> None:
    script = "import os\nfor _ in range(300): os.write(1, b'y' * 100_000)\nos.write(1, b'password-1')\n"
    _, ending = hear_out(house.python(script + TELL_MEMORY, log_limit=100_000, mask=["password-1"]))
    assert "yyy***" in ending.tail
    assert ending.dropped > 29_000_000
    assert ending.result is not None
    assert ending.result["guard_mb"] < 30


@pytest.mark.parametrize("path", ["/dev/full", "/no/such/folder/run.log"])
def test_a_full_disk_costs_the_log_and_nothing_else(house: House, path: str) -> None:
    script = """i=0; while [ $i -lt 1000 ]; do echo "line $i"; i=$((i+1)); done; echo '{"result": {"ok": 1}}'"""
    _, ending = hear_out(house.shell(script, log_path=path))
    assert (ending.exit, ending.result) == (0, {"ok": 1})
    assert ending.dropped == sum(len(f"line {n}\n") for n in range(1000)) + len('{"result": {"ok": 1}}\n')
    assert "line 999" in ending.tail


def test_a_command_that_closes_its_outputs_goes_on(house: House) -> None:
    script = "exec 1>&- 2>&-; sleep 0.2; touch done; exit 4"
    _, ending = hear_out(house.shell(script))
    assert ending.exit == 4
    assert (house.folder / "done").exists()


def test_an_event_can_be_waited_for_with_others(house: House) -> None:
    with SupervisedCommand(house.order("/bin/true")) as guarded:
        poll = select.poll()
        poll.register(guarded, select.POLLIN)
        assert poll.poll(PATIENCE * 1000)
        assert isinstance(guarded.next_event(0), Started)


def test_no_descriptor_and_no_zombie_is_left_over(house: House) -> None:
    hear_out(house.order("/bin/true"))
    before = len(os.listdir("/proc/self/fd")), len(psutil.Process().children())
    for _ in range(10):
        hear_out(house.order("/bin/true"))
    assert (len(os.listdir("/proc/self/fd")), len(psutil.Process().children())) == before
