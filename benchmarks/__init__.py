"""What `make bench` runs: our own stack on real servers, beside peers that do the same work in the same run."""

from __future__ import annotations
