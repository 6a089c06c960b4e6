"""Demo marketplace for flows: shops with orders and messages of buyers, behind a login.

    python -m examples.demo_shop --port 8765

All data is in memory. It counts its effects, so that a test can check whether a run had its effect once.
"""

from __future__ import annotations
