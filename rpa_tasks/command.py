"""The command line of a run: words with placeholders, and the little that it may see of the environment."""

from __future__ import annotations

import json
import os
import re
import shutil
import sys
import tempfile
from collections.abc import Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any
from urllib.parse import quote, unquote, urlsplit

from django.conf import settings

from rpa_tasks.markers import LEASE_NO, SHOP, STATE_DIR, TASK_ID, state_dir

PLACEHOLDERS = ("flow", "param", "timeout", "python")
#: Linux takes no word of more than 128 KB.
PARAM_LIMIT = 100 * 1024
#: Where programs are looked for, beside our own Python's; a flow that needs more names PATH among its variables.
PATH = (str(Path(sys.executable).parent), "/usr/local/bin", "/usr/bin", "/bin")
TELLING_NAMES = ("KEY", "TOKEN", "SECRET", "PASS", "CREDENTIAL", "AUTH")

#: `{"a": 1}`, `{}` and `${HOME}` are none.
_PLACEHOLDER = re.compile(r"(?<!\$)\{([a-z_]+)\}")


class ParamTooLong(ValueError):
    """The parameter is longer than a command line can carry."""


def argv_for(command: Sequence[str], *, flow: str, param: Mapping[str, Any], timeout: timedelta) -> list[str]:
    """The command with its placeholders filled in; `{timeout}` in whole seconds. Raises `ParamTooLong`.

    The parameter is pure ASCII, so that no locale can garble it.
    """
    text = json.dumps(param, separators=(",", ":"), allow_nan=False)
    if len(text) > PARAM_LIMIT:
        raise ParamTooLong(f"The parameter has {len(text):,} bytes, more than the {PARAM_LIMIT:,} a command may get.")
    values = {
        "flow": flow, "param": text, "timeout": str(int(timeout.total_seconds())), "python": sys.executable
    }  # fmt: skip
    # In one go: what was filled in is not looked at again.
    return [_PLACEHOLDER.sub(lambda found: values[found[1]], word) for word in command]


def environment_for(*, task_id: str, lease_no: int, shop: str, names: Sequence[str] = ()) -> dict[str, str]:
    """All that the command sees: a minimal environment, the variables of ours that its flow may see, and the markers.
    `shop` is `<platform>/<shop id>`. Makes the home directory; raises `OSError` where it cannot."""
    home = Path(state_dir()) / "rpa" / "home"
    home.mkdir(parents=True, exist_ok=True, mode=0o700)
    minimal = {
        "PATH": os.pathsep.join(PATH),
        "HOME": str(home),
        "LANG": "C.UTF-8",
        "TZ": settings.TIME_ZONE,
        "TMPDIR": tempfile.gettempdir(),
    }
    markers = {
        TASK_ID: task_id, LEASE_NO: str(lease_no), SHOP: shop, STATE_DIR: state_dir()
    }  # fmt: skip
    return minimal | _allowed(names) | markers


def secrets_in(environment: Mapping[str, str]) -> list[str]:
    """Values that no log may show: those whose names tell it, and the passwords in addresses."""
    telling = {value for name, value in environment.items() if any(word in name.upper() for word in TELLING_NAMES)}
    passwords = {_password_in(value) for value in environment.values()}
    return sorted((telling | passwords | {unquote(password) for password in passwords}) - {""})


def validate_command(command: object) -> list[str]:
    """What is wrong with a flow's command, in sentences; also asks the disk whether the program is there."""
    problems = check_words(command)
    if problems or not isinstance(command, list):
        return problems
    problem = check_program(command[0])
    return [problem] if problem else []


def check_words(command: object) -> list[str]:
    """What is wrong with the words alone, whatever machine they are for."""
    if not isinstance(command, list) or not all(isinstance(word, str) for word in command):
        return ["must be a list of strings, one for each word"]
    if not command or not command[0].strip():
        return ["must begin with a program"]
    found = [name for word in command for name in _PLACEHOLDER.findall(word)]
    known = ", ".join(f"{{{name}}}" for name in PLACEHOLDERS)
    problems = [f"{{{name}}} is no placeholder; there are {known}" for name in found if name not in PLACEHOLDERS]
    if "param" not in found:
        problems.append("must contain {param}, or the command never learns what to do")
    if any("\0" in word for word in command):
        problems.append("must not contain a NUL character")
    return problems


def check_program(word: str) -> str:
    """Why the program cannot be started on this machine; empty where it can."""
    program = word.replace("{python}", sys.executable)
    if shutil.which(program, path=os.pathsep.join(PATH)):
        return ""
    if os.path.dirname(program) and os.path.exists(program):
        return f"{program} is not executable"
    return f"{program} was not found"


def _allowed(names: Sequence[str]) -> dict[str, str]:
    values = {name: os.environ[name] for name in names if name in os.environ}
    if "DATABASE_URL" in names:
        values["DATABASE_URL"] = _database_url()
    return values


def _database_url() -> str:
    """Of the database that we use ourselves: with embedded servers no variable names it."""
    database = {name: str(value or "") for name, value in settings.DATABASES["default"].items()}
    user, password, name = (quote(database[part], safe="") for part in ("USER", "PASSWORD", "NAME"))
    host = f"[{database['HOST']}]" if ":" in database["HOST"] else quote(database["HOST"], safe="")
    sign_in = f"{user}:{password}@" if password else f"{user}@" if user else ""
    port = f":{database['PORT']}" if database["PORT"] else ""
    return f"postgresql://{sign_in}{host}{port}/{name}"


def _password_in(value: str) -> str:
    try:
        return urlsplit(value).password or "" if "://" in value else ""
    except ValueError:
        return ""
