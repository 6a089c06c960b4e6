"""Configuration as code: a YAML file that says what the matrix, the rules and everything else that ops edit should be.

document   the text ↔ plain values, strictly            values, fields   what each key may hold, in a table a section
section    what a section of the file is                rows             a section that is a list of rows with keys
registry   the sections there are, other apps' too      draft            one file being read, and what is wrong in it
plan       read everything, compare, then store all     impact           what happens to touches that wait
"""

from __future__ import annotations
