"""End the process before the flow ends: by a signal, or after its timeout.

The process exits inside the signal handler. An exception there would leave Playwright's event loop broken, and the
flow's own clean-up would wait on it forever. Write data in a transaction: the server rolls an unfinished one back when
the connection breaks.
"""

from __future__ import annotations

import os
import signal
import time
from types import FrameType
from typing import NoReturn

from rpa_tasks.flow_sdk.browser import Tab
from rpa_tasks.flow_sdk.errors import INTERRUPTED, TERMINATED, TIMED_OUT
from rpa_tasks.flow_sdk.messages import Wire

#: Seconds after the timeout until a run ends itself, if no other process does.
OVERTIME = 5.0
#: A SIGTERM less than this many seconds before the timeout counts as the timeout: the sender's clock started earlier.
TIMEOUT_TOLERANCE = 3.0
#: Seconds for an orderly exit after the end of the flow.
CLEANUP_SECONDS = 5.0

EXIT_CODES = {signal.SIGTERM: TERMINATED, signal.SIGINT: INTERRUPTED, signal.SIGALRM: TIMED_OUT}


class Stop:
    """Handles stop signals and the timeout from its construction on."""

    def __init__(self, tab: Tab, wire: Wire, timeout: float) -> None:
        self._tab, self._wire = tab, wire
        self._timeout_at = time.monotonic() + timeout
        self._code: int | None = None
        for number in EXIT_CODES:
            signal.signal(number, self._handle_signal)
        signal.setitimer(signal.ITIMER_REAL, timeout + OVERTIME)

    def expect_end(self, code: int) -> None:
        """Fix the exit status after the end of the flow, whatever happens during the cleanup."""
        self._code = code
        signal.setitimer(signal.ITIMER_REAL, CLEANUP_SECONDS)

    def _handle_signal(self, number: int, frame: FrameType | None) -> None:
        if self._wire.sending_result:
            self._wire.put_off = number
        else:
            self._end(number)

    def _end(self, number: int) -> NoReturn:
        for each in EXIT_CODES:
            signal.signal(each, signal.SIG_IGN)
        code = self._code
        if code is None:
            # The effect took place and was reported: a later signal does not change that.
            code = 0 if self._wire.result_sent else EXIT_CODES[signal.Signals(number)]
            os.write(2, self._last_message(number).encode())
            # At the timeout the page shows what it was waiting for, and stays open as evidence.
            if time.monotonic() < self._timeout_at - TIMEOUT_TOLERANCE:
                self._tab.close_from_outside()
        os._exit(code)

    def _last_message(self, number: int) -> str:
        if number == signal.SIGALRM:
            return "The flow's time is over.\n"
        return f"The flow was stopped by {signal.Signals(number).name}.\n"
