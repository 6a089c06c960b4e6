"""Errors of a flow. The class determines the exit status, and the status determines what happens to the job."""

from __future__ import annotations

from typing import ClassVar


class FlowError(Exception):
    """Base class. Raise one of its subclasses."""

    exit_code: ClassVar[int] = 70


class Transient(FlowError):
    """It may succeed later: tried again after 30, 60 and 120 seconds by default.

    Any exception that is not listed here counts like this one.
    """

    exit_code = 70


class BusinessError(FlowError):
    """A repeat cannot help: an operator must look at the job."""

    exit_code = 65


class SessionExpired(FlowError):
    """The shop is logged out: its jobs wait for a login by an operator, and no retry is used up."""

    exit_code = 77


class PlatformError(FlowError):
    """The platform rejects robots: tried again later. Several of these in a row stop all shops of the platform for a
    while.
    """

    exit_code = 75


class Misused(FlowError):
    """The command line does not fit the flow. Nothing has started."""

    exit_code = 64


TIMED_OUT = 124
INTERRUPTED = 130
TERMINATED = 143
