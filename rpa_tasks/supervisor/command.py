"""Build the command line and the environment of a run, and validate commands of flows."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any
from urllib.parse import quote, unquote, urlsplit

from django.conf import settings

from rpa_tasks.supervisor.markers import LEASE_NO, SHOP, STATE_DIR, TASK_ID, state_dir

PLACEHOLDERS = (
    "flow", "param", "param_file", "timeout", "python", "shop_id", "platform", "profile_id", "debug_port", "task_id"
)  # fmt: skip
#: Bytes. Linux limits one argument to 128 KiB with its NUL. It limits all arguments and the environment together to a
#: quarter of the stack limit, 2 MiB by default.
WORD_LIMIT = 128 * 1024 - 1
WORDS_LIMIT = 1024 * 1024
LONGEST_PATH = 4_096  #: bytes
MOST_FOLDERS = 20
#: Directories searched for programs, next to that of our Python. A flow that needs more has PATH among its variables.
PATH = (str(Path(sys.executable).parent), "/usr/local/bin", "/usr/bin", "/bin")
SECRET_NAME_PARTS = ("KEY", "TOKEN", "SECRET", "PASS", "CREDENTIAL", "AUTH")

#: `{"a": 1}`, `{}` and `${HOME}` do not match.
_PLACEHOLDER = re.compile(r"(?<!\$)\{([a-z_]+)\}")
#: Characters that no shell or interpreter takes for code; NUL is refused anyway.
_PLAIN = re.compile(r"[A-Za-z0-9_@%+=:,./\0-]*")


class ParamTooLong(ValueError):
    """The parameter is longer than a command line can carry."""


def argv_for(
    command: Sequence[str], *, flow: str, param: Mapping[str, Any], timeout: timedelta, param_file: str = ""
) -> list[str]:
    """Fill in the placeholders of a command; `{timeout}` in whole seconds, `{debug_port}` empty without a browser.

    Raises: `ParamTooLong` if Linux would not start the result.
    """
    own = ("shop_id", "platform", "profile_id", "debug_port", "task_id")
    values = {name: str(param[name]) if param.get(name) is not None else "" for name in own} | {
        "flow": flow, "param": param_text(param), "param_file": param_file,
        "timeout": str(int(timeout.total_seconds())), "python": sys.executable,
    }  # fmt: skip
    # In one pass: inserted text is not searched for placeholders.
    words = [_PLACEHOLDER.sub(lambda found: values[found[1]], word) for word in command]
    sizes = [len(word.encode()) for word in words]
    if max(sizes, default=0) > WORD_LIMIT:
        raise ParamTooLong(f"makes a word of {max(sizes):,} bytes; a command's word has at most {WORD_LIMIT:,}")
    if sum(sizes) > WORDS_LIMIT:
        raise ParamTooLong(f"makes a command of {sum(sizes):,} bytes; it has at most {WORDS_LIMIT:,}")
    return words


def param_text(param: Mapping[str, Any]) -> str:
    """Serialize the parameter for `{param}` and `{param_file}`: compact JSON, not escaped to ASCII."""
    return json.dumps(param, separators=(",", ":"), allow_nan=False, ensure_ascii=False)


def param_of(
    *, shop_id: str, platform: str, profile_id: str, task_id: str, delivery_key: str, lease_no: int,
    debug_port: int | None, payload: Any,
) -> dict[str, Any]:  # fmt: skip
    """Collect all that a command receives about its job."""
    return {
        "debug_port": debug_port,
        "shop_id": shop_id,
        "platform": platform,
        "profile_id": profile_id,
        "task_id": task_id,
        "delivery_key": delivery_key,
        "lease_no": lease_no,
        "payload": payload,
    }


def longest_param(payload: Any) -> dict[str, Any]:
    """Return the longest parameter of this payload, with the longest column values, ids and port."""
    return param_of(
        shop_id="x" * 64, platform="x" * 64, profile_id="x" * 140, task_id="x" * 36, delivery_key="x" * 36,
        lease_no=-(2**31), debug_port=65_535, payload=payload,
    )  # fmt: skip


def uses_param_file(command: Sequence[str]) -> bool:
    """Return whether the command uses the placeholder of the parameter file."""
    return any("param_file" in _PLACEHOLDER.findall(word) for word in command)


def environment_for(
    *,
    task_id: str,
    lease_no: int,
    shop: str,
    home: Path,
    temporary: Path,
    names: Sequence[str] = (),
    path: Sequence[str] = (),
) -> dict[str, str]:
    """Return the complete environment of a command: minimal variables, allowed variables of ours, and the markers.

    `shop` is `<platform>/<shop id>`.
    """
    minimal = {
        "PATH": os.pathsep.join([*path, *PATH]),
        "HOME": str(home),
        "LANG": "C.UTF-8",
        "TZ": settings.TIME_ZONE,
        "TMPDIR": str(temporary),
    }
    markers = {
        TASK_ID: task_id, LEASE_NO: str(lease_no), SHOP: shop, STATE_DIR: state_dir()
    }  # fmt: skip
    return minimal | _allowed_variables(names) | markers


def secrets_in(environment: Mapping[str, str]) -> list[str]:
    """Return values that no log may show: those of variables with secret names, and passwords in URLs."""
    secret_values = {
        value for name, value in environment.items() if any(word in name.upper() for word in SECRET_NAME_PARTS)
    }
    passwords = {_url_password(value) for value in environment.values()}
    return sorted((secret_values | passwords | {unquote(password) for password in passwords}) - {""})


def validate_command(command: object, path: Sequence[str] = ()) -> list[str]:
    """Return the errors of a flow's command as sentences, including a missing program on this machine."""
    problems = check_words(command)
    if problems or not isinstance(command, list):
        return problems
    problem = check_program(command[0], path)
    return [problem] if problem else []


def check_words(command: object) -> list[str]:
    """Return the errors of the words, independent of the machine."""
    if not isinstance(command, list) or not all(isinstance(word, str) for word in command):
        return ["must be a list of strings, one for each word"]
    if not command or not command[0].strip():
        return ["must start with a program"]
    found = [name for word in command for name in _PLACEHOLDER.findall(word)]
    known = ", ".join(f"{{{name}}}" for name in PLACEHOLDERS)
    problems = [f"{{{name}}} is not a placeholder; available: {known}" for name in found if name not in PLACEHOLDERS]
    if not {"param", "param_file"} & set(found):
        problems.append("must contain {param} or {param_file}; otherwise the command gets no parameters")
    if any(_PLACEHOLDER.search(command[place]) for place in code_words(command)):
        problems.append("must not have a placeholder in a word that a shell or an interpreter runs as code")
    elif any(map(_mixes_param, command)):
        problems.append("must not have {param} in a word with spaces, quotes or other special characters")
    if any("\0" in word for word in command):
        problems.append("must not contain a NUL character")
    return problems


def _mixes_param(word: str) -> bool:
    """Return whether this word may be code around the parameter, whatever program receives it.

    Clients of the API choose the parameter. All other placeholders have restricted values.
    """
    around = _PLACEHOLDER.sub("", word)
    return "param" in _PLACEHOLDER.findall(word) and not _PLAIN.fullmatch(around)


@dataclass(frozen=True, slots=True)
class Interpreter:
    """A program that runs a word of its command line as code."""

    program: str  #: regular expression of its file name
    letters: str = ""  #: short options before the code
    names: tuple[str, ...] = ()  #: long options before the code, which may be abbreviated
    taking: tuple[str, ...] = ()  #: other options with a value
    anywhere: bool = False  #: the option may follow other words
    operand: bool = False  #: the first operand is code without any option
    files: tuple[str, ...] = ()  #: options that name a file with the code, so that no operand is code
    joins: bool = False  #: the words after the code are joined to it
    whole: bool = False  #: each word after the program is code, or an option that can name a program


INTERPRETERS = (
    Interpreter(
        r"r?(ba|da|z|k|mk|a|fi|c|tc|ya|po|xon)?sh(-?[\d.]+)?|nu", "cC", ("--command", "--init-command"),
        ("-o", "+o", "-O", "+O", "--rcfile", "--init-file"),
    ),
    Interpreter(r"pwsh|powershell", names=("-commandwithargs", "-cwa", "-encodedcommand", "-ec"), joins=True),
    Interpreter(r"su|runuser|script|flock|psql", "c", ("--command", "--session-command"), anywhere=True),
    Interpreter(
        r"sudo|doas", "si", ("--shell", "--login"),
        ("-u", "-g", "-h", "-p", "-C", "-r", "-t", "-T", "-U", "-R", "-D", "-a", "-c"), joins=True,
    ),
    Interpreter(r"ssh|slogin|rsh|mosh|plink|watch|parallel|hyperfine|tmux|eval", whole=True),
    Interpreter(
        r"[gmn]?awk|original-awk", "e", ("--source",), ("-F", "-v", "-i", "-l"), operand=True,
        files=("-f", "--file", "-E", "--exec"),
    ),
    Interpreter(r"g?sed", "e", ("--expression",), ("-l",), operand=True, files=("-f", "--file")),
    Interpreter(r"\{python\}|i?python[\d.]*|pypy[\d.]*|expect", "c", (), ("-W", "-X")),
    Interpreter(r"perl[\d.]*", "eEMm", (), ("-I",)),
    Interpreter(
        r"ruby[\d.]*|lua[\d.]*|R|Rscript|julia|elixir|groovy|scala|ghci", "e", ("--eval",), ("-I", "-r", "-l", "-C")
    ),
    Interpreter(r"node(js)?|bun|deno", "ep", ("--eval", "--print", "eval"), ("-r", "-C")),
    Interpreter(r"php[\d.]*", "rBRE", ("--run",), ("-d", "-c")),
    Interpreter(r"env", "S", ("--split-string",), ("-u", "-C")),
)  # fmt: skip
#: Interpreters without an option before the code whose names are ordinary words after most programs.
ORDINARY_WORDS = re.compile(r"watch|parallel|eval")
#: Programs that start another one: after them these words are interpreters.
WRAPPERS = re.compile(
    r"env|nice|ionice|chrt|taskset|timeout|time|setsid|nohup|stdbuf|unbuffer|exec|command|sudo|doas|su|runuser|setpriv"
    r"|gosu|su-exec|xargs|find|busybox|toybox|flock|script|unshare|nsenter|chroot|bwrap|firejail|systemd-run|xvfb-run"
    r"|dbus-run-session|prlimit|strace|tini|dumb-init"
)


def code_words(command: Sequence[str]) -> set[int]:
    """Return the positions of words that a shell or another interpreter in this command runs as code.

    Any word may be the interpreter, so `env bash -c …` and `busybox sh -c …` are found. The words after the code are
    its arguments: data, unless another interpreter is among them.
    """
    return {place for start, word in enumerate(command) for place in _find_code(command, start, word)}


def _find_code(command: Sequence[str], start: int, word: str) -> Iterator[int]:
    program = _program_name(word)
    for each in INTERPRETERS:
        if re.fullmatch(each.program, program) and (
            start == 0 or not ORDINARY_WORDS.fullmatch(program) or WRAPPERS.fullmatch(_program_name(command[0]))
        ):
            yield from _interpreter_code(each, command, start + 1)
    if re.search(r"\s", word):  # several words in one, as `env -S` accepts them
        with suppress(ValueError):
            inner = shlex.split(word)
            if len(inner) > 1 and code_words(inner):
                yield start


def _program_name(word: str) -> str:
    return os.path.basename(_strip_quotes(word))


def _interpreter_code(interpreter: Interpreter, command: Sequence[str], place: int) -> Iterator[int]:
    """Return the code after the interpreter, and the options that announce it, as they may contain it."""
    if interpreter.whole:
        yield from range(place, len(command))
        return
    runs, ended = interpreter.operand, False
    while place < len(command):
        word = _strip_quotes(command[place])
        name = word.partition("=")[0]
        is_option = word.startswith(("-", "+")) or word in interpreter.names
        if not is_option or (ended and not interpreter.anywhere):
            if runs:
                yield from range(place, len(command) if interpreter.joins else place + 1)
            if runs or not interpreter.anywhere:
                return
        elif word == "--":
            ended = True
        elif name in interpreter.files or (word[:2] in interpreter.files and not word.startswith("--")):
            runs = False
            place += word in interpreter.files
        elif word in interpreter.taking:
            place += 1
        elif _announces_code(interpreter, word, name):
            runs = True
            yield from range(place, len(command) if interpreter.joins else place + 1)
        elif word == name and word.startswith("--") and not "".join(command[place + 1 : place + 2]).startswith("-"):
            place += 1  # the next word may be the value of this option, or an operand
            if runs and place < len(command):
                yield place
        place += 1


def _announces_code(interpreter: Interpreter, word: str, name: str) -> bool:
    """Return whether this option announces code. Most programs accept `--comm` for `--command`."""
    dashes = "--" if name.startswith("--") else "-"
    if name in interpreter.names or (
        len(name) > len(dashes) and any(each.startswith(name.lower()) for each in interpreter.names)
    ):
        return True
    return dashes == "-" and bool(set(word.partition("{")[0][1:]) & set(interpreter.letters))


def _strip_quotes(word: str) -> str:
    return re.sub(r"[\\'\"]", "", word).strip()


def check_program(word: str, path: Sequence[str] = ()) -> str:
    """Return why the program cannot be started on this machine; empty if it can. `path` precedes `PATH`."""
    program = word.replace("{python}", sys.executable)
    if shutil.which(program, path=os.pathsep.join([*path, *PATH])):
        return ""
    if os.path.dirname(program) and os.path.exists(program):
        return f"{program} is not executable"
    return f"{program} was not found"


def _allowed_variables(names: Sequence[str]) -> dict[str, str]:
    values = {name: os.environ[name] for name in names if name in os.environ}
    if "DATABASE_URL" in names:
        values["DATABASE_URL"] = _database_url()
    return values


def _database_url() -> str:
    """Return the URL of the database that Aftertouch uses. With embedded servers no variable has it."""
    database = {name: str(value or "") for name, value in settings.DATABASES["default"].items()}
    user, password, name = (quote(database[part], safe="") for part in ("USER", "PASSWORD", "NAME"))
    host = f"[{database['HOST']}]" if ":" in database["HOST"] else quote(database["HOST"], safe="")
    sign_in = f"{user}:{password}@" if password else f"{user}@" if user else ""
    port = f":{database['PORT']}" if database["PORT"] else ""
    return f"postgresql://{sign_in}{host}{port}/{name}"


def _url_password(value: str) -> str:
    try:
        return urlsplit(value).password or "" if "://" in value else ""
    except ValueError:
        return ""
