"""Benchmarks of `make bench`: the stack on real servers, and peers that do the same work in the same run."""

from __future__ import annotations
