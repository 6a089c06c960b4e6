"""Supervisor process of a run, its client, and the search for processes of runs.

One supervisor process starts per run. The modules it uses import neither Django nor `typing`,
`dataclasses`, `enum` or `json`.
"""
