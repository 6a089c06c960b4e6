"""Configuration as code: a YAML file for everything that operators edit.

notation   values in the file's notation, derived from columns
section    a section over the rows of one model, and a file being read    sections   those of the core, and all by name
apply      read everything, compare, store all, export; publish on top of the version that a client has read
"""

from __future__ import annotations
