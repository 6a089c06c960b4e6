"""The output of real commands under a real supervisor, and its interpretation."""

from __future__ import annotations

import json
import os
import stat
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from config.environment import ROOT
from rpa_tasks.outcomes import CommandResult, ExitCause
from rpa_tasks.supervisor.client import Progress, Started, SupervisedCommand
from rpa_tasks.supervisor.output import LOG_KEPT
from rpa_tasks.supervisor.processes import adopt_orphans
from tests.rpa_tasks.supervisor.task_commands import TaskCommands, read_to_end, run_to_end, wait_for_start

#: The supervisor's peak memory, reported by the command.
PRINT_MEMORY = """
import json, os
status = open(f"/proc/{os.getppid()}/status").read()
print()
print(json.dumps({"result": {"guard_mb": int(status.split("VmHWM:")[1].split()[0]) / 1024}}), flush=True)
"""


def test_command_reports_start_progress_result_and_end(task: TaskCommands) -> None:
    script = """
        echo hello
        echo '{"progress": 0.4, "message": "page 2"}'
        echo '{"result": {"read": 12}}'
        echo '{"result": {}} careful' >&2
    """
    heard, ending = run_to_end(task.shell(script))
    assert isinstance(heard[0], Started)
    assert Progress(0.4, "page 2") in heard
    assert ending == CommandResult(ExitCause.EXITED, exit=0, result={"read": 12}, tail=ending.tail)
    assert "hello\n" in ending.tail
    assert '{"result": {}} careful\n' in task.log.read_text()


def test_result_distinguishes_exit_status_and_signal(task: TaskCommands) -> None:
    _, ending = run_to_end(task.shell("exit 65"))
    assert (ending.ended, ending.exit, ending.signal) == (ExitCause.EXITED, 65, None)
    _, ending = run_to_end(task.shell("kill -SEGV $$"))
    assert (ending.ended, ending.exit, ending.signal) == (ExitCause.EXITED, None, 11)


def test_next_event_after_end_returns_same_result(task: TaskCommands) -> None:
    with SupervisedCommand(task.order("/bin/true")) as supervised:
        _, ending = read_to_end(supervised)
        assert supervised.next_event(0) is ending
    assert supervised.close() is ending


def test_command_receives_exact_environment(task: TaskCommands) -> None:
    script = "import json, os, sys; print(json.dumps({'result': {'env': dict(os.environ), 'cwd': os.getcwd()}}))"
    _, ending = run_to_end(task.python(script, env=task.env | {"LC_ALL": "C.UTF-8", "NAME": "值=1"}))
    assert ending.result == {"env": task.env | {"LC_ALL": "C.UTF-8", "NAME": "值=1"}, "cwd": str(task.folder)}


def test_command_inherits_no_input_and_no_descriptors(task: TaskCommands) -> None:
    readable, writable = os.pipe()
    os.set_inheritable(readable, True)
    try:
        script = """
import os, sys
print(sorted(os.listdir("/proc/self/fd"))[:-1], repr(sys.stdin.read()), os.getsid(0) == os.getpid())
"""
        _, ending = run_to_end(task.python(script))
    finally:
        os.close(readable)
        os.close(writable)
    assert ending.tail == "['0', '1', '2'] '' True\n"


def test_command_inherits_no_ignored_signals(task: TaskCommands) -> None:
    _, ending = run_to_end(task.python("print(next(line for line in open('/proc/self/status') if 'SigIgn' in line))"))
    ignored = int(ending.tail.split()[1], 16) & (1 << 31) - 1  # the C library reserves 32 and 33
    python_itself = 1 << 12 | 1 << 24  # SIGPIPE and SIGXFSZ, ignored by every Python
    assert ignored == python_itself


def test_failed_command_start_has_a_reason(task: TaskCommands) -> None:
    programs = {
        "missing": (0, b"", "command_missing"),
        "plain": (0o644, b"#!/bin/sh\n", "command_not_executable"),
        "garbage": (0o755, b"\x00\x01\x02", "command_not_executable"),
        "interpreter": (0o755, b"#!/no/such/interpreter\n", "command_missing"),
    }
    for name, (mode, content, reason) in programs.items():
        program = task.folder / name
        if mode:
            program.write_bytes(content)
            program.chmod(mode)
        heard, ending = run_to_end(task.order(str(program)))
        assert heard == []
        assert (ending.ended, ending.error) == (ExitCause.NOT_STARTED, reason)
        assert str(program) in ending.tail


def test_program_is_searched_in_path_of_its_environment(task: TaskCommands) -> None:
    program = task.folder / "rpa-cli"
    program.write_text("#!/bin/sh\nexit 3\n")
    program.chmod(stat.S_IRWXU)
    assert run_to_end(task.order("rpa-cli"))[1].error == "command_missing"
    assert run_to_end(task.order("rpa-cli", env=task.env | {"PATH": str(task.folder)}))[1].exit == 3


def test_too_long_arguments_and_missing_directory_are_named(task: TaskCommands) -> None:
    assert run_to_end(task.order("/bin/echo", "x" * 200_000))[1].error == "arguments_too_long"
    assert run_to_end(task.order("/bin/true", cwd=str(task.folder / "gone")))[1].error == "directory_missing"


def test_supervisor_that_cannot_start_is_reported(task: TaskCommands, monkeypatch: pytest.MonkeyPatch) -> None:
    adopt_orphans(False)
    monkeypatch.setattr(sys, "executable", str(task.folder / "gone"))
    with SupervisedCommand(task.order("/bin/true")) as supervised:
        ending = supervised.next_event(0)
    assert isinstance(ending, CommandResult)
    assert (ending.ended, ending.error) == (ExitCause.NOT_STARTED, "supervisor_not_started")
    assert not adopt_orphans(False), "orphans of other programs would stay zombies of this process"


def test_progress_is_rate_limited_and_last_value_arrives(task: TaskCommands) -> None:
    script = 'import time\nfor n in range(1001): print(\'{"progress": %f, "message": "%d"}\' % (n / 1000, n))'
    began = time.monotonic()
    heard, _ = run_to_end(task.python(script))
    told = [event for event in heard if isinstance(event, Progress)]
    assert told[-1] == Progress(1.0, "1000")
    assert len(told) <= 3 + 2 * (time.monotonic() - began)


def test_first_result_counts_without_newline(task: TaskCommands) -> None:
    script = """printf '{"result": {"n": 1}}\\n{"result": {"n": 2}}'"""
    assert run_to_end(task.shell(script))[1].result == {"n": 1}
    assert run_to_end(task.shell("""printf '{"result": {"n": 3}}'"""))[1].result == {"n": 3}


def test_unusable_result_is_named(task: TaskCommands) -> None:
    problems = {
        '"a string"': "result_not_readable",
        '{"n": NaN}': "result_not_readable",
        '{"n": "' + "x" * 700_000 + '"}': "result_too_long",
    }
    for value, error in problems.items():
        (task.folder / "said").write_text('{"result": ' + value + "}\n")
        _, ending = run_to_end(task.shell("cat said"))
        assert (ending.result, ending.error) == (None, error), value[:20]


def test_characters_refused_by_postgresql_are_replaced(task: TaskCommands) -> None:
    script = r"""printf '{"result": {"a\\u0000": ["\\ud800", 1]}}\nplain \377\000 bytes\n'"""
    _, ending = run_to_end(task.shell(script))
    assert ending.result == {"a�": ["?", 1]}
    assert ending.tail.endswith("plain �� bytes\n")


def test_secrets_are_masked_in_all_outputs(task: TaskCommands) -> None:
    script = """
        printf 'the pass'; printf 'word-1 is out\\n'
        echo '{"progress": 0.5, "message": "with password-1"}'
        echo '{"result": {"password-1": ["key password-1"]}}'
        printf 'line one\\nline two' >&2
    """
    heard, ending = run_to_end(task.shell(script, mask=["password-1", "line one\nline two", "is", ""]))
    told = json.dumps([repr(event) for event in [*heard, ending]]) + task.log.read_text()
    assert "password-1" not in told
    assert "line one" not in told
    assert "the *** is out" in ending.tail
    assert ending.result == {"***": ["key ***"]}


def test_supervisor_command_line_contains_no_secret(task: TaskCommands) -> None:
    order = task.shell("sleep 100", env=task.env | {"TOKEN": "password-1"}, mask=["password-1"])
    with SupervisedCommand(order) as supervised:
        parent = int(Path(f"/proc/{wait_for_start(supervised)}/stat").read_text().rsplit(")", 1)[1].split()[1])
        shown = Path(f"/proc/{parent}/cmdline").read_bytes() + Path(f"/proc/{parent}/environ").read_bytes()
        assert b"supervisor/main.py" in shown
        assert b"password-1" not in shown
        assert "password-1" not in repr(order)


def test_large_output_uses_bounded_memory_and_log(task: TaskCommands) -> None:
    script = """
import os
line = b"x" * 99 + b"\\n"
for _ in range(400):
    os.write(1, line * 1000)
"""
    _, ending = run_to_end(task.python(script + PRINT_MEMORY + "print('last line')"))
    assert ending.result is not None
    assert ending.result["guard_mb"] < 30
    log = task.log.read_bytes()
    assert LOG_KEPT <= len(log) <= 2 * LOG_KEPT
    assert log.endswith(b"last line\n")
    assert len(ending.tail) == 8_000


def test_line_without_end_is_passed_in_pieces(task: TaskCommands) -> None:
    script = "import os\nfor _ in range(300): os.write(1, b'y' * 100_000)\nos.write(1, b'password-1')\n"
    _, ending = run_to_end(task.python(script + PRINT_MEMORY, mask=["password-1"]))
    assert "yyy***" in ending.tail
    assert task.log.stat().st_size <= 2 * LOG_KEPT
    assert ending.result is not None
    assert ending.result["guard_mb"] < 30


def test_full_disk_loses_only_the_log(task: TaskCommands) -> None:
    script = """i=0; while [ $i -lt 1000 ]; do echo "line $i"; i=$((i+1)); done; echo '{"result": {"ok": 1}}'"""
    _, ending = run_to_end(task.shell(script, log_path="/dev/full"))
    assert (ending.exit, ending.result) == (0, {"ok": 1})
    assert "line 999" in ending.tail


def test_command_with_closed_outputs_continues(task: TaskCommands) -> None:
    script = "exec 1>&- 2>&-; sleep 0.2; touch done; exit 4"
    _, ending = run_to_end(task.shell(script))
    assert ending.exit == 4
    assert (task.folder / "done").exists()


def test_ended_command_leaves_no_descriptor_and_no_zombie(task: TaskCommands) -> None:
    run_to_end(task.order("/bin/true"))
    descriptors, children = len(os.listdir("/proc/self/fd")), psutil.Process().children()
    for _ in range(5):
        run_to_end(task.order("/bin/true"))
    # Those of earlier tests may go meanwhile.
    assert len(os.listdir("/proc/self/fd")) <= descriptors
    assert not set(psutil.Process().children()) - set(children)


def test_supervisor_process_imports_no_costly_module() -> None:
    """One starts for each run; these modules would cost half of its processor time, and Django far more."""
    look = f"""
import sys
sys.path.append({str(ROOT)!r})
import rpa_tasks.supervisor.event_loop
print(sorted({{"django", "enum", "json", "re", "typing"}} & set(sys.modules)))
"""
    words = [sys.executable, "-I", "-S", "-c", look]
    assert subprocess.run(words, capture_output=True, text=True, check=True).stdout.strip() == "[]"
