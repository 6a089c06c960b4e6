"""Chinese pages write dates as English ones do."""

from __future__ import annotations

from config.formats.en.formats import *  # noqa: F403
