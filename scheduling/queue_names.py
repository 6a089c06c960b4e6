"""Name the queues that exist in every deployment. Shops, platforms and nodes may have more of their own."""

from __future__ import annotations

TOUCH_QUEUES = {0: "touch.high", 1: "touch.normal", 2: "touch.low"}  #: by priority
TICK_QUEUES = ("ticks", "long")  #: of periodic passes and of long work
CORE_QUEUES = (*TOUCH_QUEUES.values(), *TICK_QUEUES)
RPA_QUEUES = ("high", "normal", "low")  #: shared by all shops without a queue of their own; highest priority first
