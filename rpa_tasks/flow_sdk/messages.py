"""Messages of a flow to its runner: one JSON object per line on standard output."""

from __future__ import annotations

import json
import os
import sys
from typing import Any

from rpa_tasks.flow_sdk.errors import BusinessError

RESULT_LIMIT = 60_000  #: bytes; the supervisor process does not read a longer line
MESSAGE_LIMIT = 200


class Wire:
    """Owns standard output. Output of the flow and of its child processes goes to standard error instead.

    A partial line before one of ours would make ours unreadable.
    """

    def __init__(self) -> None:
        sys.stdout.flush()
        self._descriptor = os.dup(1)
        os.set_inheritable(self._descriptor, False)
        os.dup2(2, 1)
        self.result_sent = False
        self.sending_result = False  #: during the output of the result: a stop signal waits until it is complete
        self.put_off: int = 0  #: the stop signal that arrived during this time

    def progress(self, fraction: float, message: str) -> None:
        inside = min(1.0, float(fraction)) if fraction > 0 else 0.0  # NaN is not greater than 0
        self._send({"progress": round(inside, 3), "message": str(message)[:MESSAGE_LIMIT]})

    def result(self, value: dict[str, Any]) -> None:
        """Print the result. Raises `BusinessError` if it cannot be stored."""
        try:
            line = json.dumps({"result": value}, allow_nan=False)
        except (TypeError, ValueError, RecursionError) as error:
            raise BusinessError(f"The result cannot be written as JSON: {error}") from error
        if len(line) > RESULT_LIMIT:
            raise BusinessError(f"The result has {len(line):,} bytes, more than the {RESULT_LIMIT:,} that are kept.")
        self.sending_result = True
        self._write(line)
        self.result_sent, self.sending_result = True, False
        if self.put_off:
            os.kill(os.getpid(), self.put_off)

    def _send(self, value: dict[str, Any]) -> None:
        self._write(json.dumps(value))

    def _write(self, line: str) -> None:
        """Write without a buffer, so that a signal finds no partial line."""
        data = line.encode() + b"\n"
        try:
            while data:
                data = data[os.write(self._descriptor, data) :]
        except BrokenPipeError:
            return  # the reader has ended
