"""Start Chromium on the profile of a shop, or attach a browser elsewhere. Lead it to its proxy, and prove that."""

from __future__ import annotations

import errno
import json
import os
import re
import shutil
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass, field, replace
from http.client import HTTPException
from ipaddress import ip_address
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit
from urllib.request import ProxyHandler, build_opener

from django.conf import settings

from rpa_tasks import isolation
from rpa_tasks.browsers import devtools, registry
from rpa_tasks.browsers.browser_processes import (
    MARKER,
    leftover_browsers_on,
    listens_on,
    release_singleton,
    unowned_processes,
)
from rpa_tasks.browsers.launch import (
    BROWSER_FAILED,
    COMMON_FLAGS,
    DISK_FULL,
    PROFILE_BUSY,
    PROXY_FAILED,
    LaunchSettings,
    NoBrowser,
    find_program,
)
from rpa_tasks.browsers.registry import Record
from rpa_tasks.supervisor.processes import end_processes, is_alive, read_process
from scheduling.channels.base import DestinationRefused
from scheduling.channels.ssrf import PrivateHosts
from scheduling.strict_text import storable_text

PROOF_TIMEOUT = 15.0  #: seconds for the echo page through the proxy
DIRECT_TIMEOUT = 5.0  #: seconds for the echo page without the proxy
ADDRESS = re.compile(r"[0-9A-Fa-f:.]{3,45}")


@dataclass(frozen=True, slots=True)
class Forwarding:
    """A socket for the forwarder of one browser, and its order, which has the password."""

    listener: socket.socket
    port: int
    order: dict[str, Any] = field(repr=False)


def open_forwarding(launch: LaunchSettings) -> Forwarding | None:
    """Open the socket to which the browser connects; None without a proxy. Raises `NoBrowser`."""
    if not launch.proxy_url:
        return None
    secrets = {"username": launch.username, "password": launch.password}
    try:
        return forward_to(launch.proxy_url, {"kind": launch.proxy_kind, **secrets})
    except OSError as error:
        raise NoBrowser(PROXY_FAILED, f"Proxy {launch.proxy_url}: {error}") from error


def forward_to(url: str, order: dict[str, Any]) -> Forwarding:
    """Open a socket of the loopback for a forwarder to this host and port. Raises `OSError`."""
    address = urlsplit(url)
    host, port = address.hostname or "", address.port or 0
    found = [str(each[4][0]) for each in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)]
    try:
        usable = PrivateHosts.from_settings().usable(host, port, found)
    except DestinationRefused as error:
        raise OSError(f"{error}. AFTERTOUCH_ALLOWED_PRIVATE_HOSTS of this node can allow it.") from error
    listener = socket.create_server(("127.0.0.1", 0))
    own = int(listener.getsockname()[1])
    return Forwarding(listener=listener, port=own, order=order | {"addresses": usable, "port": port})


def prove_proxy(port: int) -> str:
    """Return the address that the echo page sees of this browser.

    Raises: `NoBrowser` if the page is not shown, or sees the address of this node.
    """
    url = settings.AFTERTOUCH_RPA_ECHO_URL
    try:
        status, text = devtools.read_page(port, url, timeout=PROOF_TIMEOUT)
    except devtools.NoAnswer as error:
        raise NoBrowser(PROXY_FAILED, f"The echo page {url} was not shown through the proxy: {error}") from error
    seen = _find_address(text)
    if status != 200 or not seen:
        raise NoBrowser(PROXY_FAILED, f"The echo page {url} gave no address through the proxy: {status} {text[:300]}")
    if seen == _direct_address(url):
        raise NoBrowser(PROXY_FAILED, f"The proxy is not used: the echo page {url} sees this node's address {seen}.")
    return seen


def _direct_address(url: str) -> str:
    """Return the address that the echo page sees of this node, or "" if the page is only reachable by proxy."""
    try:
        with build_opener(ProxyHandler({})).open(url, timeout=DIRECT_TIMEOUT) as answer:
            return _find_address(answer.read(10_000).decode(errors="replace"))
    except (OSError, HTTPException, ValueError):
        return ""


def _find_address(text: str) -> str:
    """Return the first IP address in the text, or ""."""
    for word in ADDRESS.findall(text[:10_000]):
        try:
            return str(ip_address(word.strip(".:") if word.count(":") < 2 else word))
        except ValueError:
            continue
    return ""


# Start Chromium on the profile of a shop, or attach a browser that the company runs elsewhere.
#
# A forwarder on a port of the loopback leads to the DevTools address of a browser elsewhere. So flows, evidence and
# take-over use it like a browser of the pool. It is never ended, only detached.


START_TIMEOUT = 20.0  #: seconds, beyond the wait for a slot
ATTACH_TIMEOUT = 10.0  #: seconds for the first answer of a browser elsewhere
MIN_FREE_BYTES = 100 * 1024 * 1024  #: bytes; with less free space Chromium damages the profile instead of failing
FORWARDER = Path(__file__).with_name("forwarder.py")
PATH = "/usr/local/bin:/usr/bin:/bin"

FLAGS = [
    *COMMON_FLAGS,
    "--headless=new",
    "--no-service-autorun",
    "--noerrdialogs",
    "--hide-crash-restore-bubble",
    "--disable-default-apps",
    "--disable-crash-reporter",
    "--metrics-recording-only",
    "--mute-audio",
    "--disable-gpu",
    # Pages in the background must run at full speed.
    "--disable-background-timer-throttling",
    "--disable-backgrounding-occluded-windows",
    "--disable-renderer-backgrounding",
    "--disable-features=Translate,OptimizationHints,MediaRouter",
    "--disk-cache-size=52428800",
    "--log-level=3",
]


def find_chromium() -> str:
    """Return the path of Chromium. Raises `NoProgram` if there is none, or only one of snap."""
    return find_program(settings.RPA_CHROMIUM_PATH)


def start_browser(record: Record, launch: LaunchSettings) -> Record:
    """Start a browser and wait until it answers. The caller has slot and profile, and this record names both.

    Returns the record with process, port and address. Raises: `NoBrowser`. A process may be running then; the caller
    ends it.
    """
    profile = registry.profile_dir(record.profile)
    if shutil.disk_usage(profile).free < MIN_FREE_BYTES:
        raise NoBrowser(DISK_FULL, f"Less than {MIN_FREE_BYTES // 2**20} MB are free.")
    if others := unowned_processes(str(profile)):
        raise NoBrowser(PROFILE_BUSY, f"A browser that is not ours uses the profile: {others}.")
    # The holder of the profile's lock may end browsers on it. No record names them, so no other process would.
    end_processes(lambda: leftover_browsers_on(str(profile)), grace=2.0)
    release_singleton(profile)
    forwarding = open_forwarding(launch)
    try:
        with devtools.reserve_port() as port:
            pid = _start_chromium(record, launch, forwarding, port)
            process = read_process(pid)
            ends_at = time.monotonic() + START_TIMEOUT
            while process and is_alive(pid, process.started) and time.monotonic() < ends_at:
                # Other processes can listen on a port: it must belong to this browser.
                with suppress(devtools.NoAnswer):
                    path = devtools.websocket_path(port)
                    if listens_on(pid, port):
                        proxy_port = forwarding.port if forwarding else 0
                        return replace(
                            record, pid=pid, ticks=process.started, port=port, path=path, proxy_port=proxy_port
                        )
                time.sleep(0.02)
    finally:
        if forwarding:
            forwarding.listener.close()
    raise NoBrowser(BROWSER_FAILED, f"Chromium did not start: {_read_end_of_log(record)}")


def attach_browser(record: Record, launch: LaunchSettings) -> Record:
    """Attach the browser at `launch.cdp_url` and close the pages that are open there. See `start_browser`.

    The process of the record is the forwarder. It leads a session, carries the slot's marker and names the profile.
    """
    profile = registry.profile_dir(record.profile)
    end_processes(lambda: leftover_browsers_on(str(profile)), grace=2.0)
    try:
        forwarding = forward_to(launch.cdp_url, {"kind": "plain"})
    except OSError as error:
        raise NoBrowser(BROWSER_FAILED, f"Browser {launch.cdp_url}: {error}") from error
    try:
        # It names its profile, as Chromium does.
        pid = _start_session([f"--user-data-dir={profile}"], record, browser_environment(record), forwarding)
    finally:
        forwarding.listener.close()
    process = read_process(pid)
    try:
        path = devtools.websocket_path(forwarding.port, timeout=ATTACH_TIMEOUT)
        if process and devtools.reset_to_blank_page(forwarding.port):
            return replace(record, pid=pid, ticks=process.started, port=forwarding.port, path=path, remote=True)
    except devtools.NoAnswer as error:
        if not (process and is_alive(pid, process.started)):
            problem = f"The forwarder to {launch.cdp_url} ended: {_read_end_of_log(record)}"
        else:
            problem = f"Browser {launch.cdp_url} does not answer: {error}"
        raise NoBrowser(BROWSER_FAILED, problem) from error
    raise NoBrowser(BROWSER_FAILED, f"Browser {launch.cdp_url} has a page that does not close.")


def _launch_flags(profile: Path) -> list[str]:
    flags = [*FLAGS, f"--user-data-dir={profile}"]
    try:
        if find_sandbox_obstacle():
            flags.append("--no-sandbox")  # otherwise it refuses to start
    except isolation.CannotIsolate as error:
        raise NoBrowser(BROWSER_FAILED, str(error)) from error
    if shutil.disk_usage("/dev/shm").free < 512 * 1024 * 1024:  # noqa: S108  (the kernel's, not ours)
        flags.append("--disable-dev-shm-usage")
    return flags


def find_sandbox_obstacle() -> str:
    """Return why Chromium runs without its sandbox on this machine; empty if it has one.

    Raises: `isolation.CannotIsolate`.
    """
    if os.geteuid() == 0 and not isolation.is_isolated():
        return "it runs as root"
    return "" if may_use_namespaces() else "user.max_user_namespaces is 0"


def may_use_namespaces() -> bool:
    """Return whether the kernel lets an ordinary user create user namespaces, which Chromium's sandbox needs."""
    try:
        return int(Path("/proc/sys/user/max_user_namespaces").read_text()) > 0
    except (OSError, ValueError):
        return True


def _start_chromium(record: Record, launch: LaunchSettings, forwarding: Forwarding | None, port: int) -> int:
    """Start Chromium, and the forwarder to its proxy, and return its pid. Raises `NoBrowser` or `OSError`."""
    profile = registry.profile_dir(record.profile)
    extensions = find_extensions(launch.extensions)
    flags = [*_launch_flags(profile), *launch.command_line]
    if extensions:
        words = ",".join(map(str, extensions))
        flags += [f"--load-extension={words}", f"--disable-extensions-except={words}"]
    if forwarding:
        flags += [
            f"--proxy-server={launch.proxy_kind}://127.0.0.1:{forwarding.port}",
            "--proxy-bypass-list=<-loopback>",  # otherwise pages of this machine bypass the proxy
            "--force-webrtc-ip-handling-policy=disable_non_proxied_udp",
            "--disable-quic",
        ]
    flags += [*devtools.debug_flags(port), "about:blank"]
    environment = browser_environment(record) | launch.environment
    try:
        sandbox = isolation.isolate_browser(record.profile, extensions)
    except isolation.CannotIsolate as error:
        raise NoBrowser(BROWSER_FAILED, str(error)) from error
    return _start_session([*sandbox, find_chromium(), *flags], record, environment, forwarding)


def find_extensions(names: Iterable[str]) -> list[Path]:
    """Return the folders of these extensions, whose names are valid. Raises `NoBrowser` if the node lacks one."""
    allowed, folders = settings.AFTERTOUCH_RPA_EXTENSIONS_DIR, []
    for name in names:
        folder, problem = Path(allowed) / name, ""
        if not allowed:
            problem = "AFTERTOUCH_RPA_EXTENSIONS_DIR is not set on this node"
        elif not Path(allowed).is_absolute() or "," in allowed:
            problem = "AFTERTOUCH_RPA_EXTENSIONS_DIR must be an absolute folder without a comma"
        elif folder.is_symlink() or not folder.is_dir():
            problem = f"{allowed} of this node has no folder with this name"
        elif not (folder / "manifest.json").is_file():
            problem = f"{folder} of this node has no manifest.json"
        if problem:
            raise NoBrowser(BROWSER_FAILED, f"The extension “{name}” cannot be loaded: {problem}.")
        folders.append(folder)
    return folders


def _start_session(
    command: list[str], record: Record, environment: dict[str, str], forwarding: Forwarding | None
) -> int:
    """Start a command in a new session, with its forwarder, and return the leader's pid. Raises `OSError`.

    The command outlives its run, and often this process. A thread reaps it, so it does not stay a zombie until then.
    """
    inherited: tuple[int, ...] = ()
    if forwarding:
        inherited = (forwarding.listener.fileno(),)
        command = [sys.executable, "-I", "-S", str(FORWARDER), str(inherited[0]), *command]
    # Append mode, so that a log truncated by the maintainer starts at 0 instead of keeping a hole.
    flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND | os.O_CLOEXEC
    output = os.open(_log_path(record), flags, 0o600)
    try:
        process = subprocess.Popen(  # noqa: S603  (the words are ours)
            command, env=environment, stdin=subprocess.PIPE, stdout=output, stderr=output,
            start_new_session=True, umask=0o077, pass_fds=inherited,
        )  # fmt: skip
    finally:
        os.close(output)
    try:
        threading.Thread(target=process.wait, name="browser", daemon=True).start()
    except RuntimeError as error:  # no thread is left for a moment
        with process:
            process.kill()
        raise OSError(errno.EAGAIN, str(error)) from error
    assert process.stdin
    with suppress(BrokenPipeError), process.stdin:  # who has ended before it reads is found dead
        if forwarding:  # by standard input, because every process of this user can read command line and environment
            process.stdin.write(json.dumps(forwarding.order).encode())
    return process.pid


def _log_path(record: Record) -> Path:
    return registry.browser_logs_dir() / f"browser-{record.slot}.log"


def _read_end_of_log(record: Record) -> str:
    try:
        # NUL bytes, which follow a truncation, are replaced: PostgreSQL refuses them.
        return storable_text(_log_path(record).read_text(errors="replace")[-500:]).strip()
    except OSError as error:
        return str(error)


def browser_environment(record: Record) -> dict[str, str]:
    """Return the environment of a browser: neither secrets nor run markers, which would make it a process of a run.

    The mark of a test run stays, because a test run ends all its processes (`config.local.reaper`).
    """
    return {
        **{name: os.environ[name] for name in ("AFTERTOUCH_RUN",) if name in os.environ},
        "PATH": PATH,
        "HOME": str(registry.profile_dir(record.profile)),
        "LANG": "C.UTF-8",
        "TZ": settings.TIME_ZONE,
        MARKER: registry.slot_marker(record.slot),
    }
