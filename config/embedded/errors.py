from __future__ import annotations


class EmbeddedServerError(RuntimeError):
    """An embedded server cannot be started, reached or stopped; the text says what to do."""
