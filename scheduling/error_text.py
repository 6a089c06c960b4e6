"""Texts of errors: English wherever they go, and what a page needs to print them in its reader's language.

The code that raises an error imports `ErrorText` as `_`, so that makemessages finds the text.
`find_error_line` finds the line of a program's output that states the error.
"""

from __future__ import annotations

from typing import Any, Self

LONGEST_LINE = 300  #: characters of a returned line
TRACEBACK = "Traceback (most recent call last):"
GROUP_TRACEBACK = "+ Exception Group Traceback (most recent call last):"


class ErrorText(str):
    """An English text that keeps its template and values. APIs, logs and the database take it as any text.

    `str(error)` of an exception made with it gives it back. An f-string, a slice or `join` make a plain text of it: a
    text inside another one is a value of the other one's template.
    """

    __slots__ = ("template", "values")
    template: str
    values: dict[str, str]  #: a value may be an `ErrorText` itself

    def __new__(cls, template: str, /, **values: object) -> Self:
        """Fill `%(name)s` of the template. Without values the template is the text, with each % as it is."""
        texts = {name: value if isinstance(value, str) else str(value) for name, value in values.items()}
        text = super().__new__(cls, template % texts if texts else template)
        text.template, text.values = template, texts
        return text

    def __str__(self) -> Self:
        return self

    @classmethod
    def dump(cls, text: str) -> list[Any]:
        """Return what JSON stores of a text: template and values. A plain text has its own template."""
        if not isinstance(text, ErrorText):
            return [text, {}]
        values = text.values.items()
        return [text.template, {name: cls.dump(each) if isinstance(each, cls) else each for name, each in values}]

    @classmethod
    def load(cls, stored: list[Any]) -> Self:
        """Return the text that `dump` stored."""
        template, values = stored
        return cls(
            template, **{name: cls.load(each) if isinstance(each, list) else each for name, each in values.items()}
        )


def find_error_line(output: str) -> str:
    """Return the decisive line: the error of the last traceback, else the last line that is not blank.

    The error follows the indented frames. Its further lines, such as the call log of a browser, come after it.
    """
    lines = [line.rstrip() for line in output.splitlines() if line.strip()]
    starts = [number for number, line in enumerate(lines) if line.strip() in (TRACEBACK, GROUP_TRACEBACK)]
    for start in reversed(starts):
        indent = len(lines[start]) - len(lines[start].lstrip())
        for line in lines[start + 1 :]:
            if len(line) - len(line.lstrip()) <= indent:
                return line.strip()[:LONGEST_LINE]
    return lines[-1].strip()[:LONGEST_LINE] if lines else ""


def has_more_lines(output: str) -> bool:
    """Return whether the output has more than its error line."""
    return output.strip() != find_error_line(output)
