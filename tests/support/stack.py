"""Run a whole stack with its own servers, and ask it."""

from __future__ import annotations

import hashlib
import json
import os
import random
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar
from uuid import uuid4

import psycopg
import requests
from psycopg.rows import tuple_row
from requests.adapters import HTTPAdapter
from urllib3 import Retry

from config.environment import ROOT, environment
from config.local import servers
from config.local.isolated import RunningStack, running_stack
from config.local.processes import wait_until
from config.local.stack import refuse_older_tables
from tests.support.waiting import WAIT_LIMIT

#: What the web process of a machine that stalls does not answer, or answers by 429 or 503.
REPEAT = Retry(
    int(WAIT_LIMIT), read=3, backoff_factor=0.5, backoff_max=1, status_forcelist=(429, 503), allowed_methods=None,
    raise_on_status=False,
)  # fmt: skip
_kept: dict[str, psycopg.Connection[Any]] = {}  #: connections of the main thread, by address


@contextmanager
def connect_to_ask(url: str) -> Iterator[psycopg.Connection[Any]]:
    """Connect to PostgreSQL. The main thread keeps its connection: a new one costs 15 ms of processor time, and tests
    ask many times a second.
    """
    options: dict[str, Any] = {"autocommit": True, "connect_timeout": 10, "prepare_threshold": None}
    if threading.current_thread() is not threading.main_thread():
        with psycopg.connect(url, **options) as connection:
            yield connection
        return
    kept = _kept.pop(url, None)
    if kept is None or not is_usable(kept):
        kept = psycopg.connect(url, **options)
    try:
        yield kept
    except BaseException:
        kept.close()
        raise
    _kept[url] = kept


def is_usable(connection: psycopg.Connection[Any]) -> bool:
    """Return whether its server still has it. If not, close it."""
    try:
        connection.execute("")
    except psycopg.OperationalError:
        connection.close()
        return False
    return True


def cloud_event(id: str, type: str, user: str, **changes: Any) -> dict[str, Any]:
    return {"specversion": "1.0", "id": id, "source": "tests", "type": type, "subject": user, **changes}


@dataclass
class StackUnderTest:
    stack: RunningStack
    api_key: str = field(default="", kw_only=True)

    wait_limit: ClassVar[float] = 120.0  #: seconds
    row_factory: ClassVar[Any] = staticmethod(tuple_row)

    def sql(
        self, statement: str, parameters: Sequence[Any] | Mapping[str, Any] = (), outage_limit: float = 120.0
    ) -> Any:
        """Return rows, or the number of changed rows. Repeat for `outage_limit` seconds while PostgreSQL is down."""
        ends_at = time.monotonic() + outage_limit
        url = self.stack.endpoints.database_url
        while True:
            try:
                with connect_to_ask(url) as connection:
                    cursor = connection.cursor(row_factory=self.row_factory).execute(statement, parameters)
                    return cursor.fetchall() if cursor.description else cursor.rowcount
            except psycopg.OperationalError:
                if time.monotonic() > ends_at:
                    raise
                time.sleep(0.1)

    def create_api_key(self, *scopes: str) -> None:
        """Call the API with a key of these scopes from now on."""
        words = [word for scope in scopes for word in ("--scope", scope)]
        self.api_key = self.stack.manage("create_api_key", f"tests-{uuid4().hex[:8]}", *words).split()[-1]

    def ask(self, method: str, path: str, body: Any = None, **headers: str) -> requests.Response:
        """Return the answer to a request, which is repeated by `REPEAT`. Only the API gets the key."""
        given = {"Authorization": f"Bearer {self.api_key}"} if path.startswith("/api/") else {}
        data = body if body is None or isinstance(body, bytes) else json.dumps(body)
        with requests.Session() as session:
            session.mount(self.stack.base_url, HTTPAdapter(max_retries=REPEAT))
            answer = session.request(
                method, self.stack.base_url + path, data=data, timeout=60,
                headers={"Content-Type": "application/json", **given, **headers},
            )  # fmt: skip
        assert answer.ok, f"{method} {path}: {answer.status_code} {answer.text}"
        return answer

    def call(self, method: str, path: str, body: Any = None, **headers: str) -> Any:
        """The JSON of the answer."""
        return self.ask(method, path, body, **headers).json()

    def post_events(self, *events: Mapping[str, Any]) -> None:
        kind = {"Content-Type": "application/cloudevents-batch+json"}
        assert self.ask("POST", "/api/v1/events", events, **kind).status_code == 202

    def apply_config(self, configuration: Mapping[str, Any]) -> None:
        file = self.stack.state_dir / "configuration.json"
        file.write_text(json.dumps(configuration))
        self.stack.manage("apply_config", str(file))

    def wait(self, happened: Callable[[], bool], what: str, timeout: float = 0.0, pause: float = 0.2) -> None:
        """Wait at most `timeout` seconds, by default `wait_limit`.

        Raises: AssertionError with the logs of all programs.
        """
        timeout = timeout or self.wait_limit
        if not wait_until(happened, timeout, pause=pause):
            raise AssertionError(f"not within {timeout:g} s: {what}\n{self.describe_touches()}\n{self.logs()}")

    def log_files(self) -> list[Path]:
        return sorted((self.stack.state_dir / "logs").glob("*.log"))

    def describe_touches(self) -> str:
        """Return the number of touches that have not ended, by state and reason, with the seconds until due."""
        try:
            rows = self.sql(
                "SELECT concat_ws(' ', count(*), state, reason, paused_by, 'due in',"
                " round(extract(epoch FROM min(due_at) - now())), 'to', round(extract(epoch FROM max(due_at) - now())),"
                " 'wake-ups', max(wakeups)) AS line"
                " FROM scheduling_touch_live GROUP BY state, reason, paused_by ORDER BY count(*) DESC LIMIT 12"
            )
        except psycopg.Error as error:  # the failure that is reported matters more
            return f"touches are unknown: {error}"
        return "\n".join(str(row["line"] if isinstance(row, dict) else row[0]) for row in rows)

    def logs(self, lines: int = 10) -> str:
        """Return the last lines of each log without those of level info."""
        ends = []
        for path in self.log_files():
            found = [line for line in path.read_text(errors="replace").splitlines() if '"info"' not in line]
            ends.append(f"--- {path}\n" + "\n".join(line[:300] for line in found[-lines:]))
        return "\n".join(ends)


@contextmanager
def run_stack(
    folder: Path,
    programs: Sequence[str],
    env: Mapping[str, str] | None = None,
    *,
    concurrency: int = 2,
    migrated: bool = True,
) -> Iterator[RunningStack]:
    """Run these programs with the settings of tests until the block ends.

    `migrated=False` lets the stack create its tables itself, which is quicker for the only stack of a run.
    """
    given = {
        "DJANGO_SETTINGS_MODULE": "config.settings.test",
        "AFTERTOUCH_WORKER_CONCURRENCY": str(concurrency),
        **(env or {}),
    }
    if migrated and "DATABASE_URL" not in given and not (folder / "postgres").exists():
        copy_migrated_tables(folder)
    with running_stack(given, programs=programs, state_dir=folder) as stack:
        try:
            yield stack
        finally:
            while _kept:
                _kept.popitem()[1].close()


def read_seed() -> int:
    """Return the seed that `FAULTS_SEED` names, else a random one. Only campaigns have none."""
    return int(os.environ.get("FAULTS_SEED") or random.SystemRandom().randrange(2**32))


def copy_migrated_tables(folder: Path) -> None:
    """Give an empty state folder a cluster with the tables of this version. Only the first of a process is made, which
    takes ten times as long as a copy.
    """
    made = environment().aftertouch_state_dir.resolve() / "migrated"
    note, sources = made / "made-from", digest_of_tables()
    if not note.exists() or note.read_text() != sources:
        shutil.rmtree(made, ignore_errors=True)
        servers.open_state_dir(made)
        refuse_older_tables(made)  # it notes the version
        try:
            url = servers.start_servers(made, valkey=False).database_url
            ours = {"DJANGO_SETTINGS_MODULE": "config.settings.test", "DATABASE_URL": url}
            subprocess.run(
                [sys.executable, "manage.py", "migrate"], cwd=ROOT, env=os.environ | ours, check=True,
                capture_output=True,
            )  # fmt: skip
        finally:
            servers.stop_servers(made)
        (made / "postgres.port").unlink()  # each copy chooses its own
        note.write_text(sources)
    subprocess.run(["cp", "-a", f"{made}/.", folder], check=True)


def digest_of_tables() -> str:
    """Change with our migrations and with the packages that bring their own."""
    sources = sorted([*ROOT.glob("*/migrations/*.py"), *ROOT.glob("requirements/*.txt")])
    return hashlib.sha256(b"".join(path.read_bytes() for path in sources)).hexdigest()
