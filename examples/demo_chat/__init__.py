"""Page with a chat between a customer and an agent. Production settings do not install it."""

from __future__ import annotations
