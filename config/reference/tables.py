"""Rewrite tables of a page between `<!-- table: name -->` and `<!-- end -->`. The last column is written by hand."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

_TABLE = re.compile(r"(<!-- table: (\S+) -->\n)(.*?)(<!-- end -->)", re.DOTALL)
_CELLS = re.compile(r"(?<!\\)\|")


@dataclass(frozen=True, slots=True)
class Table:
    head: Sequence[str]  #: columns from the code
    rows: Sequence[Sequence[str]]


def rewrite_tables(page: str, tables: Mapping[str, Table]) -> str:
    """Return the page with current tables. Raises `LookupError` if a place has no table or a table no place."""
    names = [name for _, name, _, _ in _TABLE.findall(page)]
    if sorted(names) != sorted(tables):
        raise LookupError(f"the page has places for {sorted(names)}, the code has {sorted(tables)}")
    return _TABLE.sub(lambda found: found[1] + _written(tables[found[2]], _descriptions(found[3])) + found[4], page)


def silent(page: str) -> list[str]:
    """Return the first column of rows without a description."""
    return [
        first for _, _, body, _ in _TABLE.findall(page) for first, about in _descriptions(body).items() if not about
    ]


def _descriptions(body: str) -> dict[str, str]:
    """Return the last column by the first column."""
    lines = [line for line in body.splitlines() if line.startswith("|")]
    rows = [[cell.strip() for cell in _CELLS.split(line)[1:-1]] for line in lines[2:]]
    return {row[0]: row[-1] for row in rows}


def _written(table: Table, descriptions: Mapping[str, str]) -> str:
    lines = [[*table.head, "what it is for"], ["---"] * (len(table.head) + 1)]
    lines += [[*row, descriptions.get(row[0], "")] for row in table.rows]
    return "".join(f"| {' | '.join(line)} |\n".replace("|  |", "| |") for line in lines)
