"""Run a flow, try it by hand, and write the file of a new flow."""

from __future__ import annotations

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
        words = ["--flow", name, "--param", param, "--timeout", str(timeout)]
        status = _run_process([sys.executable, "-m", "rpa_tasks.flow_sdk", "run", *words])
        if show and sys.stdin.isatty():
            sys.stderr.write(f"Exit status {status}. Enter closes the browser. ")
            sys.stderr.flush()
            sys.stdin.readline()
    return status


def _run_process(words: list[str]) -> int:
    with subprocess.Popen(words) as process:  # noqa: S603  (our own module)
        try:
            return process.wait()
        except KeyboardInterrupt:  # the run received the interrupt as well
            return process.wait()
        finally:
            process.terminate()


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


def is_on_search_path(path: Path) -> bool:
    """Return whether the file is on the search path of `run_flow`."""
    return any(path.parent.resolve() == folder.resolve() for folder in flow_directories())


def search_path_command(path: Path) -> str:
    """Return the command that adds the file's directory to the search path."""
    return f"export {FLOWS_VARIABLE}={os.path.abspath(path.parent)}"
