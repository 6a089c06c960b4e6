"""Draw the state machines of docs/explanation/states.md from the transitions that the models declare."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping

from scheduling.models.ledger import Transitions

_DRAWING = re.compile(r"(<!-- states: (\w+) -->\n)(.*?)(<!-- end -->)", re.DOTALL)


def draw_page(page: str) -> str:
    """Return the page with current drawings."""
    drawings = draw_states()
    return _DRAWING.sub(lambda found: found[1] + drawings[found[2]] + found[4], page)


def draw_states() -> Mapping[str, str]:
    """Return the Mermaid drawings by the name of their place. Needs Django."""
    from rpa_tasks.models.job import JOB_TRANSITIONS, JobState
    from scheduling.models.failed_task import FAILED_TASK_TRANSITIONS, FailedTask
    from scheduling.models.touch import TOUCH_TRANSITIONS, TouchState

    planned = "planned, in the transaction of its event"
    return {
        "touch": _draw(TOUCH_TRANSITIONS, TouchState.values, start=f"scheduled: {planned}"),
        "job": _draw(JOB_TRANSITIONS, JobState.values, start="scheduled: published"),
        "failed_task": _draw(FAILED_TASK_TRANSITIONS, FailedTask.State.values, start="open"),
    }


def _draw(transitions: Transitions, states: Iterable[str], *, start: str) -> str:
    lines = [f"[*] --> {start}"]
    for state, changes in transitions.items():
        lines += [f"{state} --> {after}" + (f": {cause}" if cause else "") for after, cause in changes.items()]
    for state in states:
        if state not in transitions:
            lines.append(f"{state} --> [*]" + (": a failed task is open" if state in ("failed", "unknown") else ""))
    return "".join(f"{line}\n" for line in ["```mermaid", "stateDiagram-v2", *(f"    {line}" for line in lines), "```"])
