"""How a flow says what went wrong. Each is an exit status, and the status decides what becomes of the job."""

from __future__ import annotations

from typing import ClassVar


class FlowError(Exception):
    """Raise one of the others."""

    exit_code: ClassVar[int] = 70


class Transient(FlowError):
    """It may succeed later: tried again after 30, 60 and 120 seconds. Any exception that is not listed here counts
    like this one."""

    exit_code = 70


class BusinessError(FlowError):
    """No repeat would help: a person has to look."""

    exit_code = 65


class SessionExpired(FlowError):
    """The shop is not logged in any more: its jobs wait until a person has logged in, and no try is used up."""

    exit_code = 77


class PlatformError(FlowError):
    """The platform turns robots away: tried later, and after a few of these in a row all its shops rest."""

    exit_code = 75


class Misused(FlowError):
    """The command line does not fit the flow; nothing has begun."""

    exit_code = 64


TIMED_OUT = 124
INTERRUPTED = 130
TERMINATED = 143
