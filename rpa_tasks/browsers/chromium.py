"""Start Chromium on the profile of a shop."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from django.conf import settings

from rpa_tasks import isolation
from rpa_tasks.browsers import devtools, registry
from rpa_tasks.browsers.browser_errors import BROWSER_FAILED, DISK_FULL, PROFILE_BUSY, NoBrowser
from rpa_tasks.browsers.browser_processes import MARKER, leftover_browsers_on, listens_on, unowned_processes
from rpa_tasks.browsers.singleton import release_singleton
from rpa_tasks.supervisor.processes import end_processes, is_alive, read_process

START_TIMEOUT = 20.0  #: seconds, beyond the wait for a slot
MIN_FREE_BYTES = 100 * 1024 * 1024  #: bytes; with less free space Chromium damages the profile instead of failing
SPAWNER = Path(__file__).with_name("spawn_process.py")
NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
PATH = "/usr/local/bin:/usr/bin:/bin:/snap/bin"

FLAGS = [
    "--headless=new",
    # The kernel assigns a free port and Chromium reports it, so two browsers never collide.
    "--remote-debugging-port=0",
    "--no-first-run",
    "--no-default-browser-check",
    "--no-service-autorun",
    "--noerrdialogs",
    "--hide-crash-restore-bubble",
    "--disable-search-engine-choice-screen",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-default-apps",
    "--disable-sync",
    "--disable-breakpad",
    "--disable-crash-reporter",
    "--metrics-recording-only",
    "--password-store=basic",
    "--mute-audio",
    "--disable-gpu",
    # Pages in the background must run at full speed.
    "--disable-background-timer-throttling",
    "--disable-backgrounding-occluded-windows",
    "--disable-renderer-backgrounding",
    "--disable-features=Translate,OptimizationHints,MediaRouter",
    "--disk-cache-size=52428800",
    "--window-size=1366,900",
    "--log-level=3",
]


@dataclass(frozen=True, slots=True)
class RunningBrowser:
    pid: int
    ticks: int
    port: int
    path: str


def find_chromium() -> str:
    """Return the path of Chromium. Raises `NoBrowser` if there is none."""
    wanted = settings.RPA_CHROMIUM_PATH
    for name in [wanted] if wanted else NAMES:
        if found := shutil.which(name):
            return found
    raise NoBrowser(BROWSER_FAILED, f"Chromium was not found ({wanted or ', '.join(NAMES)}).")


def start_browser(slot: int, profile_id: str) -> RunningBrowser:
    """Start a browser and wait until it answers. The caller has slot and profile, and its record names both.

    Raises: `NoBrowser`. A process may be running then; the caller ends it.
    """
    profile = registry.profile_dir(profile_id)
    if shutil.disk_usage(profile).free < MIN_FREE_BYTES:
        raise NoBrowser(DISK_FULL, f"Less than {MIN_FREE_BYTES // 2**20} MB are free.")
    if others := unowned_processes(str(profile)):
        raise NoBrowser(PROFILE_BUSY, f"A browser that is not ours uses the profile: {others}.")
    # The holder of the profile's lock may end browsers on it. No record names them, so no other process would.
    end_processes(lambda: leftover_browsers_on(str(profile)), grace=2.0)
    release_singleton(profile)
    port_file = profile / "DevToolsActivePort"
    port_file.unlink(missing_ok=True)
    log = registry.browser_logs_dir() / f"browser-{slot}.log"
    pid = _spawn_command(
        [find_chromium(), *_launch_flags(profile)], log=log, slot=slot, profile=profile, profile_id=profile_id
    )
    process = read_process(pid)
    for _ in _poll_until(START_TIMEOUT):
        if process is None or not is_alive(pid, process.started):
            break
        # Other processes can write to the profile: the port must belong to this browser.
        if (found := _read_debug_port(port_file)) and listens_on(pid, found[0]) and _answers_on_port(*found):
            return RunningBrowser(pid, process.started, *found)
    raise NoBrowser(BROWSER_FAILED, f"Chromium did not start: {_tail_of_log(log)}")


def _launch_flags(profile: Path) -> list[str]:
    flags = [*FLAGS, f"--user-data-dir={profile}"]
    try:
        kind = isolation.mode()
    except isolation.CannotIsolate as error:
        raise NoBrowser(BROWSER_FAILED, str(error)) from error
    if (os.geteuid() == 0 and kind != isolation.UID) or not may_use_namespaces():
        flags.append("--no-sandbox")  # otherwise it refuses to run as root, or without namespaces
    if shutil.disk_usage("/dev/shm").free < 512 * 1024 * 1024:  # noqa: S108  (the kernel's, not ours)
        flags.append("--disable-dev-shm-usage")
    return [*flags, "about:blank"]


def may_use_namespaces() -> bool:
    """Return whether the kernel lets an ordinary user create user namespaces, which Chromium's sandbox needs."""
    try:
        return int(Path("/proc/sys/user/max_user_namespaces").read_text()) > 0
    except (OSError, ValueError):
        return True


def _spawn_command(command: list[str], *, log: Path, slot: int, profile: Path, profile_id: str) -> int:
    """Start the command and return its pid. Raises `NoBrowser` if it cannot be executed."""
    try:
        with isolation.plan_for_browser(profile_id) as plan:
            answer = subprocess.run(  # noqa: S603  (our own script; the words are ours)
                [sys.executable, "-I", "-S", str(SPAWNER), str(log), json.dumps(plan.confine), *plan.prefix, *command],
                env=_browser_environment(slot, profile),
                stdin=subprocess.DEVNULL,
                capture_output=True,
                timeout=START_TIMEOUT,
                check=False,
                pass_fds=plan.descriptors,
            )
    except isolation.CannotIsolate as error:
        raise NoBrowser(BROWSER_FAILED, str(error)) from error
    except subprocess.TimeoutExpired as error:
        raise NoBrowser(BROWSER_FAILED, "It could not be started in time.") from error
    try:
        return int(json.loads(answer.stdout)["pid"])
    except (ValueError, KeyError) as error:
        raise NoBrowser(BROWSER_FAILED, f"{answer.stdout!r} {answer.stderr[-500:]!r}") from error


def _browser_environment(slot: int, profile: Path) -> dict[str, str]:
    """Return the environment of a browser: neither secrets nor run markers, which would make it a process of a run.

    The mark of a test run stays, because a test run ends all its processes (`config.local.reaper`).
    """
    return {
        **{name: os.environ[name] for name in ("AFTERTOUCH_RUN",) if name in os.environ},
        "PATH": PATH,
        "HOME": str(profile),
        "LANG": "C.UTF-8",
        "TZ": settings.TIME_ZONE,
        MARKER: registry.slot_marker(slot),
    }


def _read_debug_port(port_file: Path) -> tuple[int, str] | None:
    try:
        port, path = registry.read_own(port_file).decode().split()
        return int(port), path
    except (OSError, ValueError):
        return None


def _answers_on_port(port: int, path: str) -> bool:
    try:
        return devtools.websocket_path(port) == path
    except devtools.NoAnswer:
        return False


def _poll_until(seconds: float) -> Iterator[None]:
    """Yield every 20 ms until the time is over."""
    ends_at = time.monotonic() + seconds
    while time.monotonic() < ends_at:
        yield
        time.sleep(0.02)


def _tail_of_log(log: Path) -> str:
    """Return the end of the log. NUL bytes, which follow a truncation, are replaced: PostgreSQL refuses them."""
    try:
        return log.read_text(errors="replace")[-500:].replace("\0", "\ufffd").strip()
    except OSError as error:
        return str(error)
