"""Run servers, migrations and programs in the foreground, and watch them until Ctrl-C."""

from __future__ import annotations

import hashlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from http.client import HTTPConnection, HTTPException
from pathlib import Path
from types import FrameType
from xmlrpc.client import Error as RpcError

from config.environment import ROOT, Environment
from config.local import servers
from config.local.endpoints import read_or_create_secret, remove_stack_settings, write_stack_settings
from config.local.ownership import add_stack_marker, end_leftovers, single_instance_lock
from config.local.processes import is_port_free, tail_of, wait_until
from config.local.programs import Program, StackError, stop_time_limit
from config.local.supervisor import StackWatch, Supervisor, start_supervisor, write_configuration

LIVE_WITHIN = 240.0
POLL_INTERVAL = 1.0  #: seconds; each check calls the supervisor
STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
ANY_ADDRESS = ("", "0.0.0.0", "::")  # noqa: S104 compared with, not bound


def run_foreground(settings: Environment, programs: Sequence[Program]) -> None:
    """Run until Ctrl-C or SIGTERM, then stop everything. Raises an error that prevents the start."""
    state_dir = settings.aftertouch_state_dir.resolve()
    servers.open_state_dir(state_dir)
    for number in STOP_SIGNALS:
        signal.signal(number, interrupt)  # SIGINT too: a shell starts background jobs with it ignored
    with single_instance_lock(state_dir):
        end_leftovers(state_dir, with_runs=False)
        refuse_taken_ports(settings, programs)
        stack = Foreground(settings, state_dir, programs)
        try:
            stack.start()
            stack.watch()
        except KeyboardInterrupt:
            pass
        finally:
            for number in STOP_SIGNALS:
                signal.signal(number, signal.SIG_IGN)  # the stop has its own time limit
            stack.stop()


def interrupt(number: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt


def refuse_taken_ports(settings: Environment, programs: Sequence[Program]) -> None:
    wanted = {
        "web": ("AFTERTOUCH_PORT", settings.aftertouch_port, settings.aftertouch_host),
        "flower": ("AFTERTOUCH_FLOWER_PORT", settings.aftertouch_flower_port, "127.0.0.1"),
    }
    taken = [wanted[program.name] for program in programs if program.name in wanted]
    taken = [(variable, port, host) for variable, port, host in taken if not is_port_free(port, host)]
    if taken:
        lines = [f"  port {port} on {host} is taken; set {variable} to a free one" for variable, port, host in taken]
        raise StackError("nothing was started:\n" + "\n".join(lines))


def refuse_older_tables(state_dir: Path) -> None:
    """Refuse tables that another initial migration made. Before the first release it changes in place."""
    initial = b"".join(path.read_bytes() for path in sorted(ROOT.glob("*/migrations/0001_initial.py")))
    digest, note = hashlib.sha256(initial).hexdigest(), state_dir / "initial-migrations"
    made_by = note.read_text() if note.exists() else ""
    if (state_dir / "postgres").exists() and made_by != digest:
        raise StackError(
            f"the tables in {state_dir} are those of an older version, which was not released. "
            "Run `make clean`, or move the folder, and start again."
        )
    note.write_text(digest)


class Foreground:
    def __init__(self, settings: Environment, state_dir: Path, programs: Sequence[Program]) -> None:
        self.settings = settings
        self.state_dir = state_dir
        self.programs = programs
        host = "127.0.0.1" if settings.aftertouch_host in ANY_ADDRESS else settings.aftertouch_host
        self.web_host = host
        self.base_url = f"http://{f'[{host}]' if ':' in host else host}:{settings.aftertouch_port}"
        self.flower_auth = settings.aftertouch_flower_auth.get_secret_value() or (
            f"aftertouch:{read_or_create_secret(state_dir, 'flower')}"
        )
        self.environment = self.child_environment()
        self.supervisor: subprocess.Popen[bytes] | None = None

    def child_environment(self) -> dict[str, str]:
        ours = {
            "AFTERTOUCH_STATE_DIR": str(self.state_dir),
            "AFTERTOUCH_BASE_URL": self.settings.aftertouch_base_url or self.base_url,
            "DJANGO_SETTINGS_MODULE": os.environ.get("DJANGO_SETTINGS_MODULE") or "config.settings.local",
            "FLOWER_BASIC_AUTH": self.flower_auth,
            "PYTHONUNBUFFERED": "1",
        }
        return add_stack_marker({**os.environ, **ours}, self.state_dir)

    def list_settings(self) -> dict[str, str]:
        """Return what the programs read from their environment."""
        known = {name.upper() for name in Environment.model_fields} | {"DJANGO_SETTINGS_MODULE"}
        return {name: value for name, value in self.environment.items() if name.upper() in known}

    def start(self) -> None:
        print_status(f"Aftertouch starts; logs are in {self.state_dir / 'logs'}")
        if not self.settings.database_url:
            refuse_older_tables(self.state_dir)
        write_stack_settings(self.state_dir, self.list_settings())
        self.start_servers()
        greeting = self.manage("bootstrap", "--migrate")  # one start of Python for both
        configuration = write_configuration(self.settings, self.state_dir, self.programs)
        self.supervisor = start_supervisor(configuration, self.environment)
        self.await_live()
        self.announce(greeting)

    def start_servers(self) -> None:
        servers.start_servers(
            self.state_dir, postgres=not self.settings.database_url, valkey=not self.settings.redis_url
        )

    def manage(self, *words: str) -> str:
        """Return the output of the command. Raises `StackError` with output and errors on failure."""
        done = subprocess.run(
            [sys.executable, str(ROOT / "manage.py"), *words],
            cwd=ROOT, env=self.environment, text=True, check=False, stdin=subprocess.DEVNULL, capture_output=True,
        )  # fmt: skip
        if done.returncode:
            raise StackError(f"`manage.py {' '.join(words)}` failed:\n{done.stdout}{done.stderr}")
        return done.stdout

    def await_live(self) -> None:
        if not wait_until(self.is_live, LIVE_WITHIN, pause=0.1):
            raise StackError(f"not live after {LIVE_WITHIN:.0f} s. {self.tail_of_log()}")

    def is_live(self) -> bool:
        if self.supervisor is None or self.supervisor.poll() is not None:
            raise StackError(f"the supervisor ended at once. {self.tail_of_log()}")
        try:
            states = Supervisor(self.state_dir).states()
        except (OSError, HTTPException, RpcError):
            return False
        if broken := [program for program, state in states.items() if state == "FATAL"]:
            raise StackError(f"{' and '.join(broken)} cannot be started. {self.tail_of_log()}")
        if any(state != "RUNNING" for state in states.values()):
            return False
        return "web" not in states or self.web_answers()

    def web_answers(self) -> bool:
        connection = HTTPConnection(self.web_host, self.settings.aftertouch_port, timeout=5)
        try:
            connection.request("GET", "/health/live")
            return connection.getresponse().status == 200
        except (OSError, HTTPException):
            return False
        finally:
            connection.close()

    def tail_of_log(self) -> str:
        """Return the end of each log for the error message."""
        logs = [self.state_dir / "logs" / "supervisor.err"]
        logs += [self.state_dir / "logs" / f"{program.name}.log" for program in self.programs]
        return "".join("\n".join([f"\n{log}:", *lines]) for log in logs if (lines := tail_of(log, 8)))

    def announce(self, greeting: str) -> None:
        flower = f"http://127.0.0.1:{self.settings.aftertouch_flower_port}"
        print_status(
            f"  web     {self.base_url}/\n  admin   {self.base_url}/admin/\n  API     {self.base_url}/api/v1/docs"
        )
        print_status(f"  Flower  {flower}/  (login: {self.flower_auth})")
        print_status(greeting.strip())
        print_status("Aftertouch runs. Ctrl-C stops it.")
        ready = {"pid": os.getpid(), "base_url": self.base_url, "flower_url": flower}
        draft = self.state_dir / "stack.json.new"
        draft.write_text(json.dumps(ready))
        draft.replace(self.state_dir / "stack.json")

    def watch(self) -> None:
        watch = StackWatch(self.state_dir, self.start_servers, print_status)
        while self.supervisor is not None and self.supervisor.poll() is None:
            watch.check_stack()
            time.sleep(POLL_INTERVAL)
        raise StackError(f"the supervisor ended. {self.tail_of_log()}")

    def stop(self) -> None:
        print_status("Aftertouch stops.")
        (self.state_dir / "stack.json").unlink(missing_ok=True)
        remove_stack_settings(self.state_dir)
        if self.supervisor is not None and self.supervisor.poll() is None:
            self.supervisor.terminate()
            try:
                self.supervisor.wait(stop_time_limit(self.programs))
            except subprocess.TimeoutExpired:
                self.supervisor.kill()
                self.supervisor.wait()
        end_leftovers(self.state_dir, with_runs=True)
        servers.stop_servers(self.state_dir)
        print_status("Aftertouch has stopped.")


def print_status(text: str) -> None:
    if text:
        sys.stdout.write(text + "\n")
        sys.stdout.flush()
