"""What is said to whoever started us, a JSON object a line on the standard output."""

from __future__ import annotations

import json
import os
import sys
from typing import Any

from rpa_tasks.flow_sdk.errors import BusinessError

RESULT_LIMIT = 60_000  #: bytes; a longer line is not read by the guard
MESSAGE_LIMIT = 200


class Wire:
    """Owns the standard output. What the flow prints, and what its own child processes print, goes to the error
    output instead: half a line of it in front of ours would make ours unreadable."""

    def __init__(self) -> None:
        sys.stdout.flush()
        self._descriptor = os.dup(1)
        os.set_inheritable(self._descriptor, False)
        os.dup2(2, 1)
        self.told_result = False
        self.telling = False  #: in the middle of the result: who ends us waits until it is out
        self.put_off: int = 0  #: the signal that came meanwhile

    def progress(self, fraction: float, message: str) -> None:
        inside = min(1.0, float(fraction)) if fraction > 0 else 0.0  # NaN is not greater than 0
        self._say({"progress": round(inside, 3), "message": str(message)[:MESSAGE_LIMIT]})

    def result(self, value: dict[str, Any]) -> None:
        """BusinessError: it cannot be kept, and never will."""
        try:
            line = json.dumps({"result": value}, allow_nan=False)
        except (TypeError, ValueError, RecursionError) as error:
            raise BusinessError(f"The result cannot be written as JSON: {error}") from error
        if len(line) > RESULT_LIMIT:
            raise BusinessError(f"The result has {len(line):,} bytes, more than the {RESULT_LIMIT:,} that are kept.")
        self.telling = True
        self._write(line)
        self.told_result, self.telling = True, False
        if self.put_off:
            os.kill(os.getpid(), self.put_off)

    def _say(self, value: dict[str, Any]) -> None:
        self._write(json.dumps(value))

    def _write(self, line: str) -> None:
        """Without a buffer, so that a signal finds no half written line."""
        data = line.encode() + b"\n"
        try:
            while data:
                data = data[os.write(self._descriptor, data) :]
        except BrokenPipeError:
            return  # nobody listens any more, and whoever started us knows that
