"""Flows for the demo shop. Flows of your own belong in a directory of your own: AFTERTOUCH_RPA_FLOWS."""

from __future__ import annotations
