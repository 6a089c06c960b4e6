"""Replay past events in simulated time, under a draft configuration and under the live one, and compare.

- drafts: the edits of a user, their replay and their publication
- results: both configurations on one stream of events
- history: the events and the state at the start, from PostgreSQL
- simulation: one configuration, from an event to a verdict (pure)
"""

from __future__ import annotations
