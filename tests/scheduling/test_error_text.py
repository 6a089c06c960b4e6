"""The line of an output that states the error."""

from scheduling.error_text import find_error_line, has_more_lines
from tests.support.tables import each_row

TRACEBACK = """open page 4
Traceback (most recent call last):
  File "flow.py", line 3, in run
    page.click("#export")
TimeoutError: Timeout 30000ms exceeded.
Call log:
  - waiting for locator("#export")
"""
CHAINED = """Traceback (most recent call last):
  File "a.py", line 1, in <module>
KeyError: 'no'

During handling of the above exception, another exception occurred:

Traceback (most recent call last):
  File "a.py", line 3, in <module>
ValueError: no order number
"""


@each_row(
    "output, line",
    [("", ""), ("no such page\n\n", "no such page"), ("one\ntwo\n", "two"),
     (TRACEBACK, "TimeoutError: Timeout 30000ms exceeded."), (CHAINED, "ValueError: no order number"),
     ("Traceback (most recent call last):\n  File", "File"), ("x" * 400, "x" * 300)],
)  # fmt: skip
def test_error_line_is_the_decisive_one(output, line):
    assert find_error_line(output) == line
    assert has_more_lines(output) is (output.strip() != line)
