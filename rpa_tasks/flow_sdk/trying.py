"""A flow by hand: in a browser that is opened for it, by the very command line that a worker uses."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path

from rpa_tasks.flow_sdk.browser import opened
from rpa_tasks.flow_sdk.errors import TERMINATED, Misused


def try_flow(name: str, *, shop: str, payload: str, timeout: float, profile: Path | None, show: bool) -> int:
    """The run's exit status. Misused: the payload is no JSON object, or there is no browser to be had."""
    try:
        given = json.loads(payload)
    except (ValueError, RecursionError) as error:
        raise Misused(f"--payload is not JSON: {error}") from None
    if not isinstance(given, dict):
        raise Misused("--payload must be a JSON object.")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(TERMINATED))  # through the end of the block: the browser is ours
    with opened(profile, show=show) as port:
        param = json.dumps({"shop_id": shop, "debug_port": port, "payload": given})
        words = ["--flow", name, "--param", param, "--timeout", str(timeout)]
        status = _run([sys.executable, "-m", "rpa_tasks.flow_sdk", "run", *words])
        if show and sys.stdin.isatty():
            sys.stderr.write(f"Exit status {status}. Enter closes the browser. ")
            sys.stderr.flush()
            sys.stdin.readline()
    return status


def _run(words: list[str]) -> int:
    with subprocess.Popen(words) as process:  # noqa: S603  (our own module)
        try:
            return process.wait()
        except KeyboardInterrupt:  # the run got it, too
            return process.wait()
        finally:
            process.terminate()
