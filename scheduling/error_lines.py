"""Find the line of an output that states the error."""

from __future__ import annotations

LONGEST = 300  #: characters of a returned line
TRACEBACK = "Traceback (most recent call last):"
GROUP = "+ Exception Group Traceback (most recent call last):"


def find_error_line(output: str) -> str:
    """Return the decisive line: the error of the last traceback, else the last line that is not blank.

    The error follows the indented frames. Its further lines, such as the call log of a browser, come after it.
    """
    lines = [line.rstrip() for line in output.splitlines() if line.strip()]
    starts = [number for number, line in enumerate(lines) if line.strip() in (TRACEBACK, GROUP)]
    for start in reversed(starts):
        indent = len(lines[start]) - len(lines[start].lstrip())
        for line in lines[start + 1 :]:
            if len(line) - len(line.lstrip()) <= indent:
                return line.strip()[:LONGEST]
    return lines[-1].strip()[:LONGEST] if lines else ""


def has_more_lines(output: str) -> bool:
    """Return whether the output has more than its error line."""
    return output.strip() != find_error_line(output)
