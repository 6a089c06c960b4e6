"""Define the programs of a stack. Each runs with this Python and the words beside its name."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from config.environment import Environment


class StackError(RuntimeError):
    """The stack cannot start or continue. The text contains the remedy."""


#: Seconds from the last SIGKILL of a program to its end, on a loaded machine.
KILL_MARGIN = 15.0


@dataclass(frozen=True)
class Program:
    name: str
    words: str
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


def select_programs(names: list[str] | None) -> tuple[Program, ...]:
    known = {program.name: program for program in PROGRAMS}
    unknown = [name for name in names or [] if name not in known]
    if unknown:
        raise StackError(f"no program {', '.join(unknown)}; there are {', '.join(known)}")
    return tuple(known[name] for name in names) if names else PROGRAMS


def program_command(program: Program, settings: Environment) -> str:
    words = program.words.format(
        host=settings.aftertouch_host,
        port=settings.aftertouch_port,
        flower_port=settings.aftertouch_flower_port,
        web_workers=settings.aftertouch_web_workers,
        rpa_slots=settings.aftertouch_rpa_slots,
        worker_concurrency=settings.aftertouch_worker_concurrency,
    )
    # Not resolved: only the link inside the virtual environment finds its packages.
    return f"{shlex.quote(str(Path(sys.executable)))} {words}"
