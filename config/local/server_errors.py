from __future__ import annotations


class EmbeddedServerError(RuntimeError):
    """An embedded server cannot be started, reached or stopped; the text says what to do."""


class PasswordRefusedError(EmbeddedServerError):
    """A server in our place does not know our password: it belongs to a state directory that was removed."""
