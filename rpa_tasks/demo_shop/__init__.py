"""A small marketplace to try flows on: shops with orders and buyers' messages, behind a login. It keeps everything in
memory and counts what is done to it, so that a test can see whether a run had its effect once.

    python -m rpa_tasks.demo_shop --port 8765
"""

from __future__ import annotations
