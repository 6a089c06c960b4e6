"""System checks of what a person would otherwise find out at 3 a.m."""

from __future__ import annotations
