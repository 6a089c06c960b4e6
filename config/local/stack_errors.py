from __future__ import annotations


class StackError(RuntimeError):
    """The stack cannot start or go on; the text says what to do."""
