"""Build the command line and the environment of a run, and validate commands of flows."""

from __future__ import annotations

import json
import os
import re
import shutil
import sys
from collections.abc import Mapping, Sequence
from datetime import timedelta
from itertools import cycle
from pathlib import Path
from typing import Any
from urllib.parse import quote, unquote, urlsplit

from django.conf import settings

from rpa_tasks.supervisor.output import SHORTEST_SECRET
from rpa_tasks.supervisor.runs import LEASE_NO, SHOP, STATE_DIR, TASK_ID, state_dir
from scheduling.error_text import ErrorText as _

PLACEHOLDERS = (
    "flow", "param", "param_file", "timeout", "python", "shop_id", "platform", "profile_id", "debug_port", "task_id"
)  # fmt: skip
#: Bytes. Linux limits one argument to 128 KiB with its NUL. It limits all arguments and the environment together to a
#: quarter of the stack limit, 2 MiB by default.
WORD_LIMIT = 128 * 1024 - 1
WORDS_LIMIT = 1024 * 1024
MOST_FOLDERS = 20
#: Directories searched for programs, next to that of our Python. A flow that needs more has PATH among its variables.
PATH = (str(Path(sys.executable).parent), "/usr/local/bin", "/usr/bin", "/bin")
SECRET_NAME_PARTS = ("KEY", "TOKEN", "SECRET", "PASS", "CREDENTIAL", "AUTH")

#: `{"a": 1}`, `{}` and `${HOME}` do not match.
_PLACEHOLDER = re.compile(r"(?<!\$)\{([a-z_]+)\}")
#: Members of the parameter that the run sets. The payload of a flow with `param_style: flat` must not have them.
RUN_MEMBERS = (
    "debug_port", "shop_id", "platform", "profile_id", "task_id", "delivery_key", "lease_no", "payload"
)  # fmt: skip


class CannotStart(ValueError):
    """No retry can start this command with this parameter. `reason` is the code for the run."""

    def __init__(self, reason: str, problem: str) -> None:
        super().__init__(problem)
        self.reason = reason


def argv_for(
    command: Sequence[str], *, flow: str, param: Mapping[str, Any], timeout: timedelta, param_file: str = ""
) -> list[str]:
    """Fill in the placeholders of a command; `{timeout}` in whole seconds, `{debug_port}` empty without a browser.

    Raises: `CannotStart` if Linux would not start the result.
    """
    own = ("shop_id", "platform", "profile_id", "debug_port", "task_id")
    values = {name: str(param[name]) if param.get(name) is not None else "" for name in own} | {
        "flow": flow, "param": param_text(param), "param_file": param_file,
        "timeout": str(int(timeout.total_seconds())), "python": sys.executable,
    }  # fmt: skip
    words = [values[found[1]] if (found := _PLACEHOLDER.fullmatch(word)) else word for word in command]
    sizes = [len(word.encode()) for word in words]
    if max(sizes, default=0) > WORD_LIMIT:
        problem = f"a word has {max(sizes):,} bytes; a command's word has at most {WORD_LIMIT:,}"
        raise CannotStart("arguments_too_long", problem)
    if sum(sizes) > WORDS_LIMIT:
        problem = f"the command has {sum(sizes):,} bytes; it has at most {WORDS_LIMIT:,}"
        raise CannotStart("arguments_too_long", problem)
    return words


def param_text(param: Mapping[str, Any]) -> str:
    """Serialize the parameter for `{param}` and `{param_file}`: compact JSON, not escaped to ASCII."""
    return json.dumps(param, separators=(",", ":"), allow_nan=False, ensure_ascii=False)


def param_of(payload: Mapping[str, Any], *, nested: bool, **run: Any) -> dict[str, Any]:
    """Return all that a command receives about its job: the payload's members beside those of the run, or nested.

    Raises: `CannotStart` if a flat payload would replace a member of the run.
    """
    if not nested and (taken := reserved_members(payload)):
        raise CannotStart("payload_reserved", f"the payload has {', '.join(taken)}, which the run sets")
    return run | ({"payload": payload} if nested else dict(payload))


def reserved_members(payload: Mapping[str, Any]) -> list[str]:
    """Return the members of a payload that a flat parameter cannot have."""
    return [name for name in RUN_MEMBERS if name in payload]


def uses_placeholder(command: Sequence[str], name: str) -> bool:
    return f"{{{name}}}" in command


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
    allowed = {name: os.environ[name] for name in names if name in os.environ}
    if "DATABASE_URL" in names:
        allowed["DATABASE_URL"] = _database_url()
    minimal = {
        "PATH": os.pathsep.join([*path, *PATH]),
        "HOME": str(home),
        "LANG": "C.UTF-8",
        "TZ": settings.TIME_ZONE,
        "TMPDIR": str(temporary),
    }
    markers = {TASK_ID: task_id, LEASE_NO: str(lease_no), SHOP: shop, STATE_DIR: state_dir()}
    return minimal | allowed | dict(fixed or {}) | markers


def secrets_in(environment: Mapping[str, str]) -> list[str]:
    """Return values that no log may show, as they are and as JSON spells them.

    They are the values of variables with secret names, and passwords in URLs.
    """
    secret_values = {
        value for name, value in environment.items() if any(word in name.upper() for word in SECRET_NAME_PARTS)
    }
    passwords = {_url_password(value) for value in environment.values()}
    found = secret_values | passwords | {unquote(password) for password in passwords}
    texts = {text for value in found for text in (value, *value.splitlines()) if len(text) >= SHORTEST_SECRET}
    spelled = {json.dumps(text, ensure_ascii=ascii_only)[1:-1] for text in texts for ascii_only in (True, False)}
    return sorted((found | spelled) - {""})


def check_words(command: object) -> list[str]:
    """Return the errors of a flow's command as sentences, independent of the machine."""
    if not isinstance(command, list) or not all(isinstance(word, str) for word in command):
        return [_("must be a list of strings, one for each word")]
    if not command or not command[0].strip() or (_PLACEHOLDER.search(command[0]) and command[0] != "{python}"):
        return [_("must start with a program")]
    found = [name for word in command for name in _PLACEHOLDER.findall(word)]
    known = ", ".join(f"{{{name}}}" for name in PLACEHOLDERS)
    problems: list[str] = [
        _("{%(name)s} is not a placeholder; available: %(known)s", name=name, known=known)
        for name in found
        if name not in PLACEHOLDERS
    ]
    if not {"param", "param_file"} & set(found):
        problems.append(_("must contain {param} or {param_file}; otherwise the command gets no parameters"))
    # Clients of the API choose the parameter: around it no word may be code, whatever program gets it.
    if not problems and any(_PLACEHOLDER.search(word) and not _PLACEHOLDER.fullmatch(word) for word in command):
        problems.append(_("must have each placeholder as a word of its own"))
    if any("\0" in word for word in command):
        problems.append(_("must not contain a NUL character"))
    return problems


def check_program(word: str, path: Sequence[str] = (), cwd: str = "") -> str:
    """Return why the program cannot be started on this machine; empty if it can. `path` precedes `PATH`.

    A program like `./tool` is searched in `cwd`.
    """
    program = sys.executable if word == "{python}" else word
    if os.path.dirname(program):
        program = os.path.join(cwd, program)
    if shutil.which(program, path=os.pathsep.join([*path, *PATH])):
        return ""
    if os.path.dirname(program) and os.path.exists(program):
        return _("%(program)s is not executable", program=program)
    return _("%(program)s was not found", program=program)


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
