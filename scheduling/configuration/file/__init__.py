"""Configuration as code: a YAML file for everything that operators edit.

document   text to plain values and back, strictly    schema     keys, columns and value types of a section
base       the interface of a section                 rows       a section that is a list of rows with keys
registry   all sections, those of other apps too      draft      one file being read, with its problems
apply      read everything, compare, store all         secrets    secrets in files and in printed output
versions   publish on top of the version that a client has read
"""

from __future__ import annotations
