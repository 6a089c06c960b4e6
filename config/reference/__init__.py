"""Generate the tables of `docs/reference/` from the code: `python -m config.reference`.

Names, accepted values and defaults come from the code. The last column is written by hand and kept. `tests/docs`
fails if a table is outdated or a description is missing.
"""
