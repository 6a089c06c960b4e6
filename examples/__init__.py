"""Example code: the demo, its shop, flows and chat page, and a chat client. The product imports none of it."""

from __future__ import annotations
