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
from itertools import cycle
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


#: Members of the parameter that the run sets. The payload of a flow with `param_style: flat` must not have them.
RUN_MEMBERS = (
    "debug_port", "shop_id", "platform", "profile_id", "task_id", "delivery_key", "lease_no", "payload"
)  # fmt: skip


class UnusableParam(ValueError):
    """No command can be started with this parameter. `reason` is the code for the run."""

    reason = ""


class ParamTooLong(UnusableParam):
    """The parameter is longer than a command line can carry."""

    reason = "arguments_too_long"


class ReservedMember(UnusableParam):
    """The payload of a flat parameter has members that the run sets."""

    reason = "payload_reserved"


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
    debug_port: int | None, payload: Mapping[str, Any], nested: bool,
) -> dict[str, Any]:  # fmt: skip
    """Collect all that a command receives about its job: the payload's members beside those of the run, or nested.

    Raises: `ReservedMember` if a flat payload would replace a member of the run.
    """
    if not nested and (taken := reserved_members(payload)):
        raise ReservedMember(f"the payload has {', '.join(taken)}, which the run sets")
    return {
        "debug_port": debug_port,
        "shop_id": shop_id,
        "platform": platform,
        "profile_id": profile_id,
        "task_id": task_id,
        "delivery_key": delivery_key,
        "lease_no": lease_no,
    } | ({"payload": payload} if nested else dict(payload))


def reserved_members(payload: Mapping[str, Any]) -> list[str]:
    """Return the members of a payload that a flat parameter cannot have."""
    return [name for name in RUN_MEMBERS if name in payload]


def longest_param(payload: Mapping[str, Any], *, nested: bool) -> dict[str, Any]:
    """Return the longest parameter of this payload, with the longest column values, ids and port.

    Raises: `ReservedMember`.
    """
    return param_of(
        shop_id="x" * 64, platform="x" * 64, profile_id="x" * 140, task_id="x" * 36, delivery_key="x" * 36,
        lease_no=-(2**31), debug_port=65_535, payload=payload, nested=nested,
    )  # fmt: skip


def uses_placeholder(command: Sequence[str], name: str) -> bool:
    """Return whether a word of the command has this placeholder."""
    return any(name in _PLACEHOLDER.findall(word) for word in command)


def environment_for(
    *,
    task_id: str,
    lease_no: int,
    shop: str,
    home: Path,
    temporary: Path,
    names: Sequence[str] = (),
    path: Sequence[str] = (),
    fixed: Mapping[str, str] | None = None,
) -> dict[str, str]:
    """Return the complete environment of a command: minimal variables, allowed variables of ours, `fixed` ones of the
    flow, and the markers.

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
    return minimal | _allowed_variables(names) | dict(fixed or {}) | markers


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
    elif _is_runnable_option(command):
        problems.append("must not have {param} in an option of a program that runs the value of an option")
    if any("\0" in word for word in command):
        problems.append("must not contain a NUL character")
    return problems


def _mixes_param(word: str) -> bool:
    """Return whether this word may be code around the parameter, whatever program receives it.

    Clients of the API choose the parameter. All other placeholders have restricted values.
    """
    around = _PLACEHOLDER.sub("", word)
    return "param" in _PLACEHOLDER.findall(word) and not _PLAIN.fullmatch(around)


def _is_runnable_option(command: Sequence[str]) -> bool:
    """Return whether {param} is in an option, or is the value of one, that its program may run as a command.

    `tar --checkpoint-action=exec={param}` gives the payload to a shell. After a wrapper any word may be a program.
    Options of a wrapper itself count up to its first operand.
    """
    programs = [_program_name(word) for word in command]
    wrapped = WRAPPERS.fullmatch(programs[0]) is not None
    for start, program in enumerate(programs if wrapped else programs[:1]):
        runs, wraps = OPTION_RUNNERS.fullmatch(program), WRAPPERS.fullmatch(program)
        before_is_option = False
        for word in command[start + 1 :] if runs or wraps else ():
            is_option = _strip_quotes(word).startswith("-")
            if not is_option and not runs:
                break
            if (is_option or before_is_option) and "param" in _PLACEHOLDER.findall(word):
                return True
            before_is_option = is_option
    return False


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
#: Programs with an option whose value they run, such as `rsync --rsh`, `tar --to-command` and `git -c core.sshCommand`.
OPTION_RUNNERS = re.compile(
    r"rsync|(bsd|g|s)?tar|cpio|zip|scp|sftp|git|hg|svn|sort|tcpdump|man|g?make|ncat|socat|borg|restic|rclone"
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


def check_program(word: str, path: Sequence[str] = (), cwd: str = "") -> str:
    """Return why the program cannot be started on this machine; empty if it can. `path` precedes `PATH`.

    A program like `./tool` is searched in `cwd`.
    """
    program = word.replace("{python}", sys.executable)
    if os.path.dirname(program):
        program = os.path.join(cwd, program)
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
    sign_in = f"{user}:{password}@" if password else f"{user}@" if user else ""
    hosts = [f"[{host}]" if ":" in host else quote(host, safe="") for host in database["HOST"].split(",")]
    ports = database["PORT"].split(",")  # one for all hosts, or one for each
    addresses = ",".join(f"{host}:{port}" if port else host for host, port in zip(hosts, cycle(ports), strict=False))
    return f"postgresql://{sign_in}{addresses}/{name}{settings.DATABASE_PARAMETERS}"


def _url_password(value: str) -> str:
    try:
        return urlsplit(value).password or "" if "://" in value else ""
    except ValueError:
        return ""
