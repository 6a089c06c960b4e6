"""The demo of `make demo`."""

from __future__ import annotations
