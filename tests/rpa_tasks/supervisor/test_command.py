from __future__ import annotations

import json
import os
import sys
from datetime import timedelta
from pathlib import Path
from typing import Any

import psycopg
import pytest
from django.conf import settings

from rpa_tasks.outcomes import ExitCause
from rpa_tasks.supervisor.command import (
    PLACEHOLDERS,
    WORD_LIMIT,
    CannotStart,
    argv_for,
    check_program,
    check_words,
    environment_for,
    secrets_in,
)
from tests.rpa_tasks.supervisor.task_commands import TaskCommands, run_to_end

KNOWN = ", ".join(f"{{{name}}}" for name in PLACEHOLDERS)
TEMPLATE = [
    "{python}",
    "-m",
    "rpa_tasks.flow_sdk",
    "run",
    "--flow",
    "{flow}",
    "--param",
    "{param}",
    "--timeout",
    "{timeout}",
]


def argv(command: list[str], **param: Any) -> list[str]:
    return argv_for(command, flow="pdd_sync_order", param=param, timeout=timedelta(seconds=600.9))


def environment(*names: str) -> dict[str, str]:
    folder = Path("/the")
    return environment_for(
        task_id="t-1", lease_no=7, shop="pdd/s1", home=folder / "home", temporary=folder / "run" / "tmp", names=names
    )


def test_argv_for_fills_placeholders() -> None:
    assert argv(TEMPLATE, shop_id="s1") == [
        sys.executable, "-m", "rpa_tasks.flow_sdk", "run", "--flow", "pdd_sync_order", "--param", '{"shop_id":"s1"}',
        "--timeout", "600",
    ]  # fmt: skip
    words = ["{shop_id}", "{platform}", "{profile_id}", "{debug_port}", "{task_id}", "{param_file}"]
    values = {"shop_id": "s1", "platform": "pdd", "profile_id": "p-s1", "debug_port": 9222, "task_id": "t1"}
    filled = argv_for(words, flow="f", param=values, timeout=timedelta(seconds=1), param_file="/run/p.json")
    assert filled == ["s1", "pdd", "p-s1", "9222", "t1", "/run/p.json"]
    assert argv(["{debug_port}"], debug_port=None) == [""]


def test_argv_for_keeps_other_braces_and_inserted_text() -> None:
    assert argv(["x", "{param}"], text="{timeout}") == ["x", '{"text":"{timeout}"}']
    words = ["awk", "{ print $1 }", '{"a": 1}', "{}", "${HOME}", "{Param}"]
    assert argv(words) == words
    assert check_words([*words, "{param}"]) == []


def test_payload_reaches_command_unchanged(task: TaskCommands) -> None:
    payload = ["订单 值", "\0 \U0001f600", "'; rm -rf ~; '", '{"nested": "{param}"}', "\n"]
    program = """
import json, sys
payload = json.loads(sys.argv[1])["payload"]
print(json.dumps({"result": {"hex": repr(payload).encode("utf-16", "surrogatepass").hex()}}))
"""
    words = argv(["{python}", "-c", program, "{param}"], payload=payload)
    _, ending = run_to_end(task.order(*words))
    assert ending.result == {"hex": repr(payload).encode("utf-16", "surrogatepass").hex()}


def test_longest_parameter_can_be_started_and_a_longer_one_is_refused(task: TaskCommands) -> None:
    fits = "x" * (WORD_LIMIT - len('{"p":""}'))
    assert len(argv(["{param}"], p=fits)[0]) == WORD_LIMIT
    with pytest.raises(CannotStart, match="131,072 bytes"):
        argv(["{param}"], p=fits + "x")
    with pytest.raises(CannotStart, match="the command has"):
        argv(["{param}"] * 9, p=fits)
    _, ending = run_to_end(task.order(*argv(["/bin/echo", "{param}"], p=fits)))
    assert (ending.ended, ending.exit) == (ExitCause.EXITED, 0)


# --- the environment ----------------------------------------------------------------------------------------------


def test_environment_for_returns_only_required_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DJANGO_SECRET_KEY", "password-1")
    told = environment()
    assert told == {
        "PATH": told["PATH"],
        "HOME": "/the/home",
        "LANG": "C.UTF-8",
        "TZ": "Asia/Shanghai",
        "TMPDIR": "/the/run/tmp",
        "AFTERTOUCH_TASK_ID": "t-1",
        "AFTERTOUCH_LEASE_NO": "7",
        "AFTERTOUCH_SHOP": "pdd/s1",
        "AFTERTOUCH_STATE_DIR": str(settings.AFTERTOUCH_STATE_DIR),
    }
    assert told["PATH"].split(":")[0] == str(Path(sys.executable).parent)


def test_environment_for_adds_listed_variables_but_no_markers(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("PDD_TOKEN", "PATH", "AFTERTOUCH_TASK_ID"):
        monkeypatch.setenv(name, "ours")
    monkeypatch.delenv("NOT_SET", raising=False)
    told = environment("PDD_TOKEN", "PATH", "AFTERTOUCH_TASK_ID", "NOT_SET")
    assert (told["PDD_TOKEN"], told["PATH"], told["AFTERTOUCH_TASK_ID"]) == ("ours", "ours", "t-1")
    assert "NOT_SET" not in told


def test_environment_for_returns_usable_database_url() -> None:
    assert "DATABASE_URL" not in environment()
    with psycopg.connect(environment("DATABASE_URL")["DATABASE_URL"], connect_timeout=10) as connection:
        assert connection.execute("SELECT 1").fetchone() == (1,)


@pytest.mark.parametrize(
    ("database", "expected"),
    [
        ({"HOST": "db", "PORT": "5432", "NAME": "a", "USER": "u", "PASSWORD": "p@:/"}, "postgresql://u:p%40%3A%2F@db:5432/a"),
        ({"HOST": "/run/pg", "PORT": "", "NAME": "a", "USER": "u", "PASSWORD": ""}, "postgresql://u@%2Frun%2Fpg/a"),
        (
            {"HOST": "h1,h2", "PORT": "1,2", "NAME": "a", "USER": "u", "PASSWORD": ""},
            "postgresql://u@h1:1,h2:2/a?sslmode=require",
        ),
        ({"HOST": "h1,::1", "PORT": "1", "NAME": "a", "USER": "", "PASSWORD": ""}, "postgresql://h1:1,[::1]:1/a"),
        ({"HOST": "::1", "PORT": 5432, "NAME": "a", "USER": "", "PASSWORD": ""}, "postgresql://[::1]:5432/a"),
    ],
)  # fmt: skip
def test_database_url_escapes_characters(
    database: dict[str, Any], expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(settings.DATABASES, "default", database)
    monkeypatch.setattr(settings, "DATABASE_PARAMETERS", "".join(expected.partition("?")[1:]))
    assert environment("DATABASE_URL")["DATABASE_URL"] == expected
    told = psycopg.conninfo.conninfo_to_dict(expected)
    assert (told["host"], told.get("password", "")) == (database["HOST"], database["PASSWORD"])


def test_secrets_in_finds_secret_names_and_url_passwords() -> None:
    secrets = secrets_in({
        "PDD_TOKEN": "t-123456", "api_key": "k-123456", "DATABASE_URL": "postgresql://u:p%40ss@db/a", "HOME": "/home",
        "EMPTY_SECRET": "", "ODD": "http://[", "PROXY": "http://proxy:3128", "SHOP_SECRET": 'a"b\n值',
    })  # fmt: skip
    quoted = ['a"b\n值', r"a\"b\n\u503c", r"a\"b\n值"]  # as it is, and as JSON spells it
    assert secrets == [*quoted, "k-123456", "p%40ss", "p@ss", "t-123456"]
    assert r"first\"line" in secrets_in({"KEY_SECRET": 'first"line\nsecond'}), "output is masked line by line"


# --- validation ---------------------------------------------------------------------------------------------------


PROBLEMS: list[tuple[Any, str]] = [
    ("rpa-cli run {param}", "must be a list of strings, one for each word"),
    (["sh", 5, "{param}"], "must be a list of strings, one for each word"),
    (None, "must be a list of strings, one for each word"),
    ([], "must start with a program"),
    ([" ", "{param}"], "must start with a program"),
    (["sh", "-c", "exit"], "must contain {param} or {param_file}; otherwise the command gets no parameters"),
    (["sh", "{param}", "{shop}"], f"{{shop}} is not a placeholder; available: {KNOWN}"),
    (["sh", "{param}", "{root}"], f"{{root}} is not a placeholder; available: {KNOWN}"),
    (["{flow}", "{param}"], "must start with a program"),
    (["sh", "\0", "{param}"], "must not contain a NUL character"),
    (["no-such-program", "{param}"], "no-such-program was not found"),
    (["/no/such/program", "{param}"], "/no/such/program was not found"),
    (["/etc/passwd", "{param}"], "/etc/passwd is not executable"),
    (["/etc", "{param}"], "/etc is not executable"),
    *(
        (["rpa-cli", "{param}", word], "must have each placeholder as a word of its own")  # around it may be code
        for word in ("--param={param}", "run {param}", "{param}{param}", "{param} ", "'{param}'", "{flow}.py")
    ),
]


def test_command_that_cannot_work_is_refused_with_the_problem() -> None:
    found = [(command, check_words(command) or [check_program(command[0])]) for command, _ in PROBLEMS]
    assert found == [(command, [problem]) for command, problem in PROBLEMS]


def test_check_words_does_not_look_for_program() -> None:
    assert check_words(["no-such-program", "{param}"]) == []
    assert check_program("{python}") == ""
    assert check_program("no-such-program") == "no-such-program was not found"


def test_validated_command_can_be_started(task: TaskCommands) -> None:
    assert check_words(TEMPLATE) == check_words(["python", "-c", "print(1)", "{param}"]) == []
    _, ending = run_to_end(task.order(*argv(["python", "-c", "print(1)", "{param}"]), env=environment(), cwd="/"))
    assert (ending.exit, ending.tail) == (0, "1\n")
    assert json.loads(argv(["{param}"])[0]) == {}


def test_environment_for_puts_flow_path_first(tmp_path: Path) -> None:
    program = tmp_path / "rpa-cli"
    program.write_text("#!/bin/sh\n")
    assert check_program("rpa-cli", [str(tmp_path)]) == "rpa-cli was not found" or os.geteuid() == 0
    program.chmod(0o755)
    assert check_program("rpa-cli") == "rpa-cli was not found"
    assert check_program("rpa-cli", [str(tmp_path)]) == ""
    told = environment_for(
        task_id="t", lease_no=1, shop="pdd/s1", home=tmp_path, temporary=tmp_path, path=[str(tmp_path)]
    )
    assert told["PATH"].split(":")[0] == str(tmp_path)
