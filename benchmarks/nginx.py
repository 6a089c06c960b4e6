"""Run nginx as a receiver that is no bottleneck, and read the arrivals of calls from its log."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil

from benchmarks.environment import Bench, stop_program, wait_until
from config.local.processes import select_port

# One process without a master: a master writes its title over its environment, in which the run finds it.
CONFIG = """
daemon off;
master_process off;
pid {folder}/nginx.pid;
events {{ worker_connections 4096; }}
http {{
    client_body_temp_path {folder}/body;
    proxy_temp_path {folder}/proxy;
    fastcgi_temp_path {folder}/fastcgi;
    uwsgi_temp_path {folder}/uwsgi;
    scgi_temp_path {folder}/scgi;
    keepalive_timeout 1h;
    keepalive_requests 1000000;
    log_format calls '$msec $request_time $http_webhook_id';
    access_log {folder}/calls.log calls;
    server {{
        listen 127.0.0.1:{port} backlog=4096;
        location / {{ return 204; }}
    }}
}}
"""


class Nginx:
    """A running nginx. `arrivals` has the instants of the first bytes by `webhook-id`, in milliseconds of the epoch."""

    def __init__(self, process: psutil.Process, url: str, log: Path) -> None:
        self.process = process
        self.url = url
        self.arrivals: defaultdict[str, list[int]] = defaultdict(list)
        self._log = log
        self._position = 0

    def read_log(self) -> int:
        """Read the new lines of the log. Return the number of different calls since the last `forget`."""
        with self._log.open("rb") as log:
            log.seek(self._position)
            lines = log.read()
        lines = lines[: lines.rfind(b"\n") + 1]
        self._position += len(lines)
        for line in lines.decode().splitlines():
            logged_at, seconds, name = line.split(" ", 2)
            self.arrivals[name].append(round((float(logged_at) - float(seconds)) * 1000))
        return len(self.arrivals)

    def forget(self) -> None:
        self.read_log()
        self.arrivals.clear()


@contextmanager
def running_nginx(bench: Bench) -> Iterator[Nginx]:
    """Run nginx with an empty log.

    Raises:
        FileNotFoundError: nginx is not installed.
    """
    binary = find_nginx()
    if binary is None:
        raise FileNotFoundError("this scenario needs nginx: apt-get install nginx-light")
    folder, port = bench.state_dir / "nginx", select_port()
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    (folder / "nginx.conf").write_text(CONFIG.format(folder=folder, port=port), "utf-8")
    words = [binary, "-p", str(folder), "-c", str(folder / "nginx.conf"), "-e", str(folder / "error.log")]
    program = subprocess.Popen(words, env=bench.environment, stdin=subprocess.DEVNULL, start_new_session=True)
    try:
        log, pid = folder / "calls.log", folder / "nginx.pid"
        # nginx listens before it writes the number of its process.
        wait_until(lambda: pid.exists() or program.poll() is not None, 20, "nginx", pause=0.02)
        if program.poll() is not None:
            raise RuntimeError(f"nginx has not started: {(folder / 'error.log').read_text('utf-8')}")
        yield Nginx(psutil.Process(program.pid), f"http://127.0.0.1:{port}/", log)
    finally:
        stop_program(program)


def find_nginx() -> str | None:
    """Return the path of the program. It is often not in the PATH of accounts other than root."""
    return shutil.which("nginx", path=f"{os.environ.get('PATH', '')}:/usr/sbin")
