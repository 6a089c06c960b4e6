"""The three ways a request can end without an answer, and what each one means for the ledger.

The border between the last two is the first byte of the request: before it the receiver certainly has nothing, from
it on nobody on this side can know.
"""

from __future__ import annotations

from scheduling.channels.base import Outcome, Permanent, Transient, Unknown


class Failure(Exception):
    """A request without an answer. `reason` is a code from a bounded set; `detail` never holds a URL or a secret."""

    def __init__(self, reason: str, detail: str = "") -> None:
        super().__init__(f"{reason}: {detail}" if detail else reason)
        self.reason = reason
        self.detail = detail

    def outcome(self) -> Outcome:
        raise NotImplementedError


class Refused(Failure):
    """Never left this machine and never will: the URL is unusable or leads to an address that is not public."""

    def outcome(self) -> Permanent:
        return Permanent(self.reason, self.detail)


class NotSent(Failure):
    """No byte of the request was written: no name, no connection, no TLS, or no time left."""

    def outcome(self) -> Transient:
        return Transient(self.reason, self.detail)


class NoAnswer(Failure):
    """The request was (or may have been) written, then came silence, a reset or something that is not HTTP."""

    def outcome(self) -> Unknown:
        return Unknown(self.reason, self.detail)
