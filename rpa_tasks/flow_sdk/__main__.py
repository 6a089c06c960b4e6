"""Run a flow, try it by hand, list flows, and write the file of a new flow: `python -m rpa_tasks.flow_sdk`."""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import traceback
from pathlib import Path

from rpa_tasks.flow_sdk import discovery
from rpa_tasks.flow_sdk.discovery import FLOW_NAME, FLOWS_VARIABLE, flow_directories
from rpa_tasks.flow_sdk.flow import (
    TERMINATED,
    BusinessError,
    Flow,
    FlowError,
    Misused,
    Stop,
    Tab,
    Transient,
    Wire,
    open_browser,
    read_param,
)


def run_flow(name: str, param: str, timeout: float) -> int:
    """Run a flow and return the exit status."""
    try:
        fields = read_param(param)
        discovery.find_flow(name)
    except FlowError as error:
        return _print_error(error)
    tab, wire = Tab(fields.pop("debug_port"), timeout), Wire()
    stop = Stop(tab, wire, timeout)
    code = _execute_flow(name, Flow(**fields, timeout=timeout, tab=tab, wire=wire))
    stop.expect_end(code)
    # After an error the page stays open as evidence. The owner of the browser cleans up.
    try:
        tab.leave(keep=code != 0)
    except Exception as error:  # the browser may have died; the flow's result is already printed
        sys.stderr.write(f"The tab could not be closed: {error}\n")
    return code


def _execute_flow(name: str, flow: Flow) -> int:
    """Run the flow and print its result at once: after the effect no later error may hide the result."""
    try:
        result = discovery.load_flow(name)(flow)
        if result is not None and not isinstance(result, dict):
            raise BusinessError(f"run() must return a dict or None, not {type(result).__name__}.")
        if result is not None:
            flow.wire.result(result)
    except FlowError as error:
        return _print_error(error)
    except Exception:
        traceback.print_exc()
        return Transient.exit_code
    return 0


def _print_error(error: FlowError) -> int:
    sys.stderr.write(f"{type(error).__name__}: {error}\n")
    return error.exit_code


def try_flow(name: str, *, shop: str, payload: str, timeout: float, profile: Path | None, show: bool) -> int:
    """Run a flow in a new browser and return the exit status.

    Raises: `Misused` if the payload is no JSON object or there is no browser.
    """
    try:
        given = json.loads(payload)
    except (ValueError, RecursionError) as error:
        raise Misused(f"--payload is not JSON: {error}") from None
    if not isinstance(given, dict):
        raise Misused("--payload must be a JSON object.")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(TERMINATED))  # so that leaving the block closes the browser
    with open_browser(profile, show=show) as port:
        param = json.dumps({"shop_id": shop, "debug_port": port, "payload": given})
        words = [sys.executable, "-m", "rpa_tasks.flow_sdk", "run", "--flow", name, "--param", param]
        with subprocess.Popen([*words, "--timeout", str(timeout)]) as process:  # noqa: S603  (our own module)
            try:
                status = process.wait()
            except KeyboardInterrupt:  # the run received the interrupt as well
                status = process.wait()
            finally:
                process.terminate()
        if show and sys.stdin.isatty():
            sys.stderr.write(f"Exit status {status}. Enter closes the browser. ")
            sys.stderr.flush()
            sys.stdin.readline()
    return status


STARTER = Path(__file__).with_name("starter.txt")


def write_starter(name: str, folder: Path | None = None) -> Path:
    """Write the starter file of a flow, in `folder` or in the first directory of the search path. Overwrites no file.

    Raises: `Misused` if the name is invalid or taken, or the file cannot be written.
    """
    if not FLOW_NAME.fullmatch(name):
        raise Misused(f"{name!r} is no name for a flow: letters, digits, “_”, “-” and “.”, at most 140.")
    folder = folder or flow_directories()[0]
    path = folder / f"{name}.py"
    text = STARTER.read_text(encoding="utf-8").replace("NAME", name)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with path.open("x", encoding="utf-8") as file:
            file.write(text)
    except FileExistsError:
        raise Misused(f"{path} is there already.") from None
    except OSError as error:
        raise Misused(f"{path} cannot be written: {error.strerror}") from None
    return path


def main(words: list[str]) -> int:
    order = _build_flow_parser().parse_args(words)
    if order.what == "run":
        return run_flow(order.flow, order.param, order.timeout)
    try:
        if order.what == "try":
            return try_flow(
                order.flow,
                shop=order.shop,
                payload=order.payload,
                timeout=order.timeout,
                profile=order.profile,
                show=order.show,
            )
        if order.what == "list":
            for name, description, path in discovery.list_flows():
                sys.stdout.write(f"{name:<28} {description}  ({path})\n")
            return 0
        path = write_starter(order.name, order.to)
    except Misused as error:
        sys.stderr.write(f"{error}\n")
        return error.exit_code
    sys.stdout.write(f"Wrote {path}\n")
    if not any(path.parent.resolve() == folder.resolve() for folder in flow_directories()):
        sys.stdout.write(f"It is found after: export {FLOWS_VARIABLE}={os.path.abspath(path.parent)}\n")
    return 0


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> None:  # type: ignore[override]
        """Print the usage and exit with the status of `Misused`."""
        self.print_usage(sys.stderr)
        self.exit(Misused.exit_code, f"{self.prog}: {message}\n")


def _parse_seconds(word: str) -> float:
    seconds = float(word)
    if not 0 < seconds <= 86_400:
        raise ValueError
    return seconds


_parse_seconds.__name__ = "number of seconds between 0 and 86400"


def _build_flow_parser() -> argparse.ArgumentParser:
    parser = _Parser(prog="python -m rpa_tasks.flow_sdk", description="Runs flows: Python files with a run(flow).")
    commands = parser.add_subparsers(dest="what", required=True)
    run = commands.add_parser("run", help="run a flow as workers do")
    run.add_argument("--param", required=True, help="JSON: shop_id, debug_port, …, members of the payload")
    attempt = commands.add_parser("try", help="run a flow by hand in a new browser")
    attempt.add_argument("--shop", default="s1", help="the shop id (default: s1)")
    attempt.add_argument("--payload", default="{}", help="JSON (default: {})")
    attempt.add_argument("--profile", type=Path, help="keep the browser's profile, with its logins, in this directory")
    attempt.add_argument("--show", action="store_true", help="show the browser window, and leave it open")
    for each in (run, attempt):
        each.add_argument("--flow", required=True, help="name of its file, without .py")
        each.add_argument("--timeout", type=_parse_seconds, default=600.0, help="seconds (default: 600)")
    new = commands.add_parser("new", help="write the file of a new flow")
    new.add_argument("name")
    new.add_argument("--to", type=Path, help=f"the directory (default: the first of {discovery.FLOWS_VARIABLE})")
    commands.add_parser("list", help="list flows")
    return parser


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
