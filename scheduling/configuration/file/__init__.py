"""Configuration as code: a YAML file for everything that operators edit.

document   text to plain values and back, strictly    notation   values in the file's notation, derived from columns
section    a section over the rows of one model       matrix, contents   the sections of the core
sections   all sections, those of other apps too      apply      read everything, compare, store all
versions   publish on top of the version that a client has read
"""

from __future__ import annotations
