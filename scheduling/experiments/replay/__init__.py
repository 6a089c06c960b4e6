"""What-if replay: events that really came, once more in simulated time, under a draft and under what is live.

world     pure: one configuration's house, from an event to a verdict    figures  pure: what is counted of it
past      what the house remembers of the time before                    draft    the text ↔ a configuration
replay    both worlds, one stream of events                              runs     rows: begun, executed, published
"""

from __future__ import annotations
