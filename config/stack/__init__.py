"""All of Aftertouch on one machine: `python -m config.stack run`, and `running_stack()` for the demo and the tests."""

from __future__ import annotations

from config.stack.running import RunningStack, running_stack

__all__ = ["RunningStack", "running_stack"]
