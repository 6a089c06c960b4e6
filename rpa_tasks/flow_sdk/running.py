"""One run of one flow, from the command line's words to the exit status."""

from __future__ import annotations

import sys
import traceback

from rpa_tasks.flow_sdk import discovery
from rpa_tasks.flow_sdk.errors import BusinessError, FlowError, Transient
from rpa_tasks.flow_sdk.flow import Flow, read_param
from rpa_tasks.flow_sdk.stopping import Stop
from rpa_tasks.flow_sdk.tab import Tab
from rpa_tasks.flow_sdk.wire import Wire


def run(name: str, param: str, timeout: float) -> int:
    """The exit status."""
    try:
        fields = read_param(param)
        discovery.find(name)
    except FlowError as error:
        return _complain(error)
    tab, wire = Tab(fields.pop("debug_port"), timeout), Wire()
    stop = Stop(tab, wire, timeout)
    code = _carry_out(name, Flow(**fields, timeout=timeout, tab=tab, wire=wire))
    stop.expect_end(code)
    # What went wrong is still to be seen there: the page is the evidence. Whoever lent the browser tidies up.
    _leave(tab, keep=code != 0)
    return code


def _carry_out(name: str, flow: Flow) -> int:
    """The result is told before anything else happens: once the effect took place, nothing may hide it."""
    try:
        result = discovery.load(name)(flow)
        if result is not None and not isinstance(result, dict):
            raise BusinessError(f"run() must return a dict or None, not {type(result).__name__}.")
        if result is not None:
            flow.wire.result(result)
    except FlowError as error:
        return _complain(error)
    except Exception:
        traceback.print_exc()
        return Transient.exit_code
    return 0


def _leave(tab: Tab, *, keep: bool) -> None:
    try:
        tab.leave(keep=keep)
    except Exception as error:  # the browser may have died meanwhile; the flow's own end is told already
        sys.stderr.write(f"The tab could not be closed: {error}\n")


def _complain(error: FlowError) -> int:
    sys.stderr.write(f"{type(error).__name__}: {error}\n")
    return error.exit_code
