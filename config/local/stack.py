"""Run servers, migrations and programs in the foreground, and start again what ends, until Ctrl-C.

A state directory has one stack at a time. Its processes carry a mark, by which those of a killed stack are ended.
"""

from __future__ import annotations

import hashlib
import json
import os
import resource
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from http.client import HTTPConnection, HTTPException
from pathlib import Path
from types import FrameType

import psutil  # type: ignore[import-untyped,unused-ignore]

from config.environment import ROOT, Environment
from config.local import servers
from config.local.endpoints import (
    EmbeddedServerError,
    read_endpoints,
    read_or_create_secret,
    stack_settings,
    write_private,
)
from config.local.processes import (
    command_line_of,
    end_process,
    environment_of,
    is_alive,
    is_port_free,
    kill_leftovers,
    open_lock_file,
    parent_death_prefix,
    processes_with_variable,
    send_signal,
    tail_of,
    try_lock,
    wait_until,
)


class StackError(RuntimeError):
    """The stack cannot start or continue. The text contains the remedy."""


#: Seconds from the last SIGKILL of a program to its end, on a loaded machine.
KILL_MARGIN = 15.0


@dataclass(frozen=True)
class Program:
    name: str
    words: str  # for this Python
    stop_within: int = 15  # seconds from SIGTERM to SIGKILL of the whole process group


PROGRAMS = (
    Program(
        "web",
        "-m uvicorn config.asgi:application --host {host} --port {port} --workers {web_workers}"
        # No deflate: it costs a connection more memory than everything else, and chat frames are short.
        " --http config.http_protocol:BoundedHttpProtocol"
        " --ws websockets-sansio --ws-ping-interval 60 --ws-max-size 65536 --ws-per-message-deflate false"
        # No proxy runs in front: uvicorn would trust X-Forwarded-For of every process on loopback.
        " --timeout-graceful-shutdown 5 --no-proxy-headers",
    ),
    Program(
        "core",
        "-m celery -A config worker -Q touch.high,touch.normal,touch.low -c {worker_concurrency}"
        " -n core@%h --without-gossip --without-mingle",
        stop_within=30,
    ),
    # Periodic passes have a worker of their own: a backlog of touches does not delay them.
    Program(
        "ticks",
        "-m celery -A config worker -Q ticks -c 2 -n ticks@%h --without-gossip --without-mingle",
        stop_within=30,
    ),
    # Replays, bulk actions, imports and erasures take minutes. They do not delay the passes.
    Program(
        "long",
        "-m celery -A config worker -Q long -c 2 -n long@%h --without-gossip --without-mingle",
        stop_within=30,
    ),
    Program(
        "execution",
        "-m celery -A config worker -Q high,normal,low -c {rpa_slots}"
        " -n execution@%h --without-gossip --without-mingle",
        stop_within=45,
    ),
    Program("beat", "-m celery -A config beat"),
    Program("watcher", "manage.py watch_sessions"),
    # The login is passed in FLOWER_BASIC_AUTH, because every user of the machine can read a command line.
    Program("flower", "-m celery -A config flower --address=127.0.0.1 --port={flower_port}"),
)


def stop_time_limit(programs: Sequence[Program]) -> float:
    """Return the seconds within which these programs end, all asked at once."""
    return max(program.stop_within for program in programs) + KILL_MARGIN


def select_programs(names: Sequence[str]) -> tuple[Program, ...]:
    """Return the programs of these names, without names all."""
    known = {program.name: program for program in PROGRAMS}
    unknown = [name for name in names if name not in known]
    if unknown:
        raise StackError(f"no program {', '.join(unknown)}; there are {', '.join(known)}")
    return tuple(known[name] for name in names) if names else PROGRAMS


def program_command(program: Program, settings: Environment) -> list[str]:
    """Return the words that run the program with this Python."""
    words = program.words.format(
        host=settings.aftertouch_host,
        port=settings.aftertouch_port,
        flower_port=settings.aftertouch_flower_port,
        web_workers=settings.aftertouch_web_workers,
        rpa_slots=settings.aftertouch_rpa_slots,
        worker_concurrency=settings.aftertouch_worker_concurrency,
    )
    # Not resolved: only the link inside the virtual environment finds its packages.
    return [sys.executable, *shlex.split(words)]


PROGRAMS_WITHIN = 15.0  #: seconds from SIGTERM to SIGKILL for programs of an earlier stack
#: Seconds from the end of the programs to SIGKILL for what outlived them: runs with a deaf command, and their browsers.
#: A supervisor of a run needs 17 s after the loss of its worker. The maintainer of the browsers ends after both.
LEFTOVERS_WITHIN = 60.0
#: Seconds from SIGTERM to the end of a stack: its programs, their leftovers, its servers.
OWNER_WITHIN = stop_time_limit(PROGRAMS) + LEFTOVERS_WITHIN + servers.STOP_WITHIN
STACK_MARKER = "AFTERTOUCH_STACK"  # inherited by every process of a stack, so that it is found in any session or folder


def stack_note(state_dir: Path) -> Path:
    """Return the file with the addresses and pids of a live stack."""
    return state_dir / "stack.json"


def held_programs(state_dir: Path) -> Path:
    """Return the folder with an empty file for each program that the stack stops and does not start."""
    return state_dir / "held"


@contextmanager
def single_instance_lock(state_dir: Path) -> Iterator[None]:
    """Hold the lock of a state directory. It ends with this process and is not inherited."""
    with open_lock_file(state_dir / "stack.lock") as lock:
        if not try_lock(lock):
            raise StackError(
                f"Aftertouch already runs from {state_dir} (pid {owner_pid(state_dir)}); `make stop` ends it, "
                "another AFTERTOUCH_STATE_DIR gives a second one"
            )
        lock.truncate(0)
        lock.write(str(os.getpid()))
        lock.flush()
        yield


def owner_pid(state_dir: Path) -> int | None:
    """Return the pid of the process that holds the lock; None if none does."""
    path = state_dir / "stack.lock"
    if not path.exists():
        return None
    with path.open("a+") as lock:
        if try_lock(lock):
            return None
        lock.seek(0)
        return int(lock.read() or 0) or None


def end_leftovers(state_dir: Path, *, with_runs: bool) -> None:
    """Send SIGTERM to the programs of the stack, and kill what does not end in time.

    `with_runs`: its runs and browsers must end too. Otherwise the maintainer of the next stack ends them.

    Raises:
        StackError: some do not end.
    """

    def list_programs() -> list[psutil.Process]:
        return processes_with_variable(STACK_MARKER, str(state_dir))

    def find() -> list[psutil.Process]:
        return [*list_programs(), *(list_run_processes(state_dir) if with_runs else ())]

    for process in list_programs():
        send_signal(process, signal.SIGTERM)
    if left := kill_leftovers(find, LEFTOVERS_WITHIN if with_runs else PROGRAMS_WITHIN):
        raise StackError(f"these processes of {state_dir} do not end: {', '.join(str(each.pid) for each in left)}")


def list_run_processes(state_dir: Path) -> list[psutil.Process]:
    """Return the processes of runs and browsers: their environment has other marks. Supervisors have them as words."""
    mark = f"AFTERTOUCH_STATE_DIR={state_dir}"
    # `make stop AFTERTOUCH_STATE_DIR=…` has the mark of a supervisor among its words.
    callers = {each.pid for each in psutil.Process().parents()}

    def is_of_run(process: psutil.Process) -> bool:
        marks = environment_of(process)
        is_program_of_run = marks.get("AFTERTOUCH_TASK_ID") and marks.get("AFTERTOUCH_STATE_DIR") == str(state_dir)
        is_of_browser = marks.get("AFTERTOUCH_BROWSER", "").startswith(f"{state_dir}/")
        return bool(is_program_of_run) or is_of_browser or mark in command_line_of(process)

    return [
        process
        for process in psutil.process_iter()
        if process.pid not in callers and is_of_run(process) and is_alive(process)
    ]


def stop_stack(state_dir: Path) -> None:
    """End the stack of this state directory with its servers. Works also for a stack whose owner was killed."""
    state_dir = state_dir.resolve()
    if (pid := owner_pid(state_dir)) is not None and psutil.pid_exists(pid):
        owner = psutil.Process(pid)
        if "config.local" in command_line_of(owner):
            end_process(owner, (signal.SIGTERM, OWNER_WITHIN), (signal.SIGKILL, 5.0))
    end_leftovers(state_dir, with_runs=True)
    servers.stop_servers(state_dir)


LIVE_WITHIN = 240.0
STEADY = 10.0  #: seconds that a program runs before its next end counts as the first
MOST_ENDS = 5  #: ends in a row, each sooner than `STEADY`, after which a start is given up
PAUSE = 0.2  #: seconds between two looks at the programs
SERVERS_EVERY = 1.0  #: seconds between two looks at servers and logs
LOG_LIMIT = 10 * 1024 * 1024  #: bytes of a log, and of the one before
OPEN_FILES = 65_536
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
            ignore_stop_signals()  # the stop has its own time limit
            stack.stop()


def ignore_stop_signals() -> None:
    for number in STOP_SIGNALS:
        signal.signal(number, signal.SIG_IGN)


def interrupt(number: int, frame: FrameType | None) -> None:
    ignore_stop_signals()  # a second one must not interrupt the stop
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


class KeptProgram:
    """A program that is started again when it ends. It has a process group of its own."""

    def __init__(self, program: Program, command: list[str], environment: dict[str, str], log: Path) -> None:
        self.name = program.name
        self.stop_within = program.stop_within
        self.command = [*parent_death_prefix(), *command]
        self.environment = environment
        self.log = log
        self.process: subprocess.Popen[bytes] | None = None
        self.ends = 0  # in a row, each sooner than `STEADY`
        self.started_at = self.next_start = 0.0
        self.kill_at: float | None = None  # a stop was requested

    @property
    def has_settled(self) -> bool:
        """Return whether it runs for a second. One that cannot start ends sooner."""
        return self.process is not None and time.monotonic() - self.started_at >= 1.0

    def check(self, *, held: bool) -> None:
        """Start it if it does not run. A held program is stopped instead, with SIGKILL after its time limit."""
        now = time.monotonic()
        if self.process is not None and _has_ended(self.process.pid):
            self.handle_end(self.process, now)
        if self.process is None:
            if not held and now >= self.next_start:
                self.start(now)
        elif self.kill_at is not None and now >= self.kill_at:
            _kill_group(self.process.pid)
        elif held:
            self.request_stop()

    def start(self, now: float) -> None:
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                self.command, cwd=ROOT, env=self.environment, start_new_session=True,
                stdin=subprocess.DEVNULL, stdout=log, stderr=log,
            )  # fmt: skip
        self.started_at = now

    def request_stop(self) -> None:
        """Send SIGTERM. Idempotent. A program that is not held starts again at its end."""
        if self.process is not None and self.kill_at is None:
            self.process.terminate()
            self.kill_at = time.monotonic() + self.stop_within

    def handle_end(self, process: subprocess.Popen[bytes], now: float) -> None:
        """End the rest of its group, which would keep the port and the messages from the next process."""
        if process.returncode is None:  # else its number is free, and another group may have it
            _kill_group(process.pid)
        process.wait()
        if self.kill_at is None:
            print_status(f"{self.name} (pid {process.pid}) ended, see {self.log}; it is started again")
        self.ends = 1 if self.kill_at is not None or now - self.started_at >= STEADY else self.ends + 1
        self.next_start = now + min(self.ends - 1, MOST_ENDS)
        self.process, self.kill_at = None, None


class Foreground:
    def __init__(self, settings: Environment, state_dir: Path, programs: Sequence[Program]) -> None:
        self.settings = settings
        self.state_dir = state_dir
        host = "127.0.0.1" if settings.aftertouch_host in ANY_ADDRESS else settings.aftertouch_host
        self.web_host = host
        self.base_url = f"http://{f'[{host}]' if ':' in host else host}:{settings.aftertouch_port}"
        self.flower_url = f"http://127.0.0.1:{settings.aftertouch_flower_port}"
        self.flower_auth = settings.aftertouch_flower_auth.get_secret_value() or (
            f"aftertouch:{read_or_create_secret(state_dir, 'flower')}"
        )
        self.environment = {
            **os.environ,
            "AFTERTOUCH_STATE_DIR": str(state_dir),
            "AFTERTOUCH_BASE_URL": settings.aftertouch_base_url or self.base_url,
            "DJANGO_SETTINGS_MODULE": os.environ.get("DJANGO_SETTINGS_MODULE") or "config.settings.local",
            "FLOWER_BASIC_AUTH": self.flower_auth,
            "PYTHONUNBUFFERED": "1",
            STACK_MARKER: str(state_dir),
        }
        self.logs = state_dir / "logs"
        self.logs.mkdir(mode=0o700, exist_ok=True)
        self.programs = programs
        self.kept = [
            KeptProgram(each, program_command(each, settings), self.environment, self.logs / f"{each.name}.log")
            for each in programs
        ]
        self.servers: dict[str, psutil.Process] = {}
        self.note = ""  # the content of `stack_note`

    def start(self) -> None:
        print_status(f"Aftertouch starts; logs are in {self.logs}")
        if not self.settings.database_url:
            refuse_older_tables(self.state_dir)
        shutil.rmtree(held_programs(self.state_dir), ignore_errors=True)
        known = {name.upper() for name in Environment.model_fields} | {"DJANGO_SETTINGS_MODULE"}
        ours = {name: value for name, value in self.environment.items() if name.upper() in known}
        write_private(stack_settings(self.state_dir), json.dumps(ours))
        self.start_servers()
        greeting = self.manage("bootstrap", "--migrate")  # one start of Python for both
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        most = OPEN_FILES if hard == resource.RLIM_INFINITY else min(hard, OPEN_FILES)
        resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, most), hard))
        self.await_live()
        print_status(
            f"  web     {self.base_url}/\n  admin   {self.base_url}/admin/\n  API     {self.base_url}/api/v1/docs\n"
            f"  Flower  {self.flower_url}/  (login: {self.flower_auth})"
        )
        print_status(greeting.strip())
        print_status("Aftertouch runs. Ctrl-C stops it.")

    def start_servers(self) -> None:
        servers.start_servers(
            self.state_dir, postgres=not self.settings.database_url, valkey=not self.settings.redis_url
        )
        pids = servers.server_pids(self.state_dir)
        self.servers = {label: psutil.Process(pid) for label, pid in pids.items() if pid}

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
        if not wait_until(self.is_live, LIVE_WITHIN, pause=PAUSE):
            raise StackError(f"not live after {LIVE_WITHIN:.0f} s. {self.tail_of_logs()}")

    def is_live(self) -> bool:
        self.check_programs()
        if broken := [kept.name for kept in self.kept if kept.ends >= MOST_ENDS]:
            raise StackError(f"{' and '.join(broken)} cannot be started. {self.tail_of_logs()}")
        if not all(kept.has_settled for kept in self.kept):
            return False
        return all(kept.name != "web" for kept in self.kept) or self.web_answers()

    def web_answers(self) -> bool:
        connection = HTTPConnection(self.web_host, self.settings.aftertouch_port, timeout=5)
        try:
            connection.request("GET", "/health/live")
            return connection.getresponse().status == 200
        except (OSError, HTTPException):
            return False
        finally:
            connection.close()

    def tail_of_logs(self) -> str:
        logs = [kept.log for kept in self.kept]
        return "".join("\n".join([f"\n{log}:", *lines]) for log in logs if (lines := tail_of(log, 8)))

    def check_programs(self) -> None:
        for kept in self.kept:
            kept.check(held=(held_programs(self.state_dir) / kept.name).exists())

    def watch(self) -> None:
        next_look = 0.0
        while True:
            self.check_programs()
            if time.monotonic() >= next_look:
                self.revive_servers()
                next_look = time.monotonic() + SERVERS_EVERY
            try:
                self.trim_logs()
                self.write_note()
            except OSError as error:  # such as a full disk, which is no reason to stop
                print_status(str(error))
            time.sleep(PAUSE)

    def revive_servers(self) -> None:
        dead = [label for label, process in self.servers.items() if not is_alive(process)]
        before = read_endpoints(self.state_dir)
        if not dead or before is None:  # without addresses the servers were stopped on purpose
            return
        print_status(f"{' and '.join(dead)} died; started again")
        try:
            self.start_servers()
        except EmbeddedServerError as error:
            print_status(str(error))
            return
        if read_endpoints(self.state_dir) != before:
            for kept in self.kept:
                kept.request_stop()  # they start again with the new addresses

    def trim_logs(self) -> None:
        """Keep the last part of each log. Its writers append, so they continue at the new start.

        Lines that are written between copy and truncation are lost.
        """
        for log in self.logs.glob("*.log"):
            if log.stat().st_size > LOG_LIMIT:
                shutil.copyfile(log, log.with_suffix(".log.1"))
                os.truncate(log, 0)

    def write_note(self) -> None:
        """Note for `isolated` that the stack is live, where, and the pids of its programs."""
        pids = {kept.name: kept.process.pid for kept in self.kept if kept.process is not None}
        note = json.dumps({"base_url": self.base_url, "flower_url": self.flower_url, "pids": pids})
        if note != self.note:
            write_private(stack_note(self.state_dir), note)
            self.note = note

    def stop(self) -> None:
        print_status("Aftertouch stops.")
        stack_note(self.state_dir).unlink(missing_ok=True)
        stack_settings(self.state_dir).unlink(missing_ok=True)
        wait_until(self.have_stopped, stop_time_limit(self.programs))
        try:
            end_leftovers(self.state_dir, with_runs=True)
        finally:
            servers.stop_servers(self.state_dir)
        print_status("Aftertouch has stopped.")

    def have_stopped(self) -> bool:
        for kept in self.kept:
            kept.check(held=True)
        return all(kept.process is None for kept in self.kept)


def _has_ended(pid: int) -> bool:
    """Return whether the child has ended, and leave it as a zombie that keeps the number of its group."""
    try:
        return os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None
    except ChildProcessError:  # a signal interrupted `handle_end` after its wait
        return True


def _kill_group(leader: int) -> None:
    with suppress(ProcessLookupError):
        os.killpg(leader, signal.SIGKILL)


def print_status(text: str) -> None:
    """Print a line. A terminal or pipe that is closed must not keep the stop from ending the servers."""
    if text:
        with suppress(OSError):
            sys.stdout.write(text + "\n")
            sys.stdout.flush()
