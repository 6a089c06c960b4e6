"""The tables of `docs/reference/`, written from the code: `python -m config.reference`.

What is known of a setting or a field (its name, what fits, its default) comes from the code; what it means stands in
the last column, is written by people and is kept. `tests/docs` fails where a table is out of date or says nothing.
"""
