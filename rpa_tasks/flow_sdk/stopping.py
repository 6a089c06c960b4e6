"""Ending before the flow does: because somebody said so, or because its time is over.

The process ends inside the handler. Raising an exception there would leave Playwright's event loop broken in the
middle, and the flow's own clean-up would then wait on it for ever. What a flow writes belongs in a transaction: the
server undoes an unfinished one when the connection breaks.
"""

from __future__ import annotations

import os
import signal
import time
from types import FrameType
from typing import NoReturn

from rpa_tasks.flow_sdk.browser import Tab
from rpa_tasks.flow_sdk.errors import INTERRUPTED, TERMINATED, TIMED_OUT
from rpa_tasks.flow_sdk.wire import Wire

#: Seconds after the timeout at which a run ends itself, in case nobody else does it.
OVERTIME = 5.0
#: Seconds before the timeout from which a SIGTERM is taken for it: who measures it began before us.
NEARLY = 3.0
#: Seconds to leave in good order once the flow is over.
LEAVING = 5.0

CODES = {signal.SIGTERM: TERMINATED, signal.SIGINT: INTERRUPTED, signal.SIGALRM: TIMED_OUT}


class Stop:
    """Listens from its construction on."""

    def __init__(self, tab: Tab, wire: Wire, timeout: float) -> None:
        self._tab, self._wire = tab, wire
        self._timeout_at = time.monotonic() + timeout
        self._code: int | None = None
        for number in CODES:
            signal.signal(number, self._hear)
        signal.setitimer(signal.ITIMER_REAL, timeout + OVERTIME)

    def expect_end(self, code: int) -> None:
        """The flow is over with this exit status, whatever happens to the tidying up that follows."""
        self._code = code
        signal.setitimer(signal.ITIMER_REAL, LEAVING)

    def _hear(self, number: int, frame: FrameType | None) -> None:
        if self._wire.telling:
            self._wire.put_off = number
        else:
            self._end(number)

    def _end(self, number: int) -> NoReturn:
        for each in CODES:
            signal.signal(each, signal.SIG_IGN)
        code = self._code
        if code is None:
            # The effect took place and was reported: what comes now is too late to change that.
            code = 0 if self._wire.told_result else CODES[signal.Signals(number)]
            os.write(2, self._last_words(number).encode())
            # At the timeout the page shows what it was waiting for, and is kept; otherwise nobody wants to see it.
            if time.monotonic() < self._timeout_at - NEARLY:
                self._tab.close_from_outside()
        os._exit(code)

    def _last_words(self, number: int) -> str:
        if number == signal.SIGALRM:
            return "The flow's time is over.\n"
        return f"The flow was stopped by {signal.Signals(number).name}.\n"
