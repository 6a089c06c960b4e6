"""Flows for the demo shop. Your own flows belong in a directory of AFTERTOUCH_RPA_FLOWS."""

from __future__ import annotations
