"""What the guard process is made of. It starts once a run, so nothing in here imports more than it must: no Django,
no `typing`, no `dataclasses`."""
