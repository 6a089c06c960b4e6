"""Replay past events in simulated time, under a draft configuration and under the live one, and compare.

- simulation: one configuration, from an event to a verdict (pure)
- figures: the counts of one simulation (pure)
- history: the events and the state at the start, from PostgreSQL
- results: all simulations on one stream of events
- runs: the rows, with start, execution and publication
"""

from __future__ import annotations
