"""The Lua scripts of the store, as the server runs them. Each file's header names its keys and arguments."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field
from pathlib import Path

_FOLDER = Path(__file__).resolve().parent.parent / "lua"
_PRELUDE = (_FOLDER / "prelude.lua").read_text(encoding="utf-8")


@dataclass(frozen=True)
class Script:
    name: str
    text: str = field(init=False, repr=False)
    digest: str = field(init=False, repr=False)

    def __post_init__(self) -> None:
        text = _PRELUDE + (_FOLDER / f"{self.name}.lua").read_text(encoding="utf-8")
        object.__setattr__(self, "text", text)
        object.__setattr__(self, "digest", hashlib.sha1(text.encode(), usedforsecurity=False).hexdigest())


NOTE_ACTIVITY = Script("note_activity")
NOTE_PRESENCE = Script("note_presence")
PEEK_SILENT = Script("peek_silent")
CLAIM_SILENT = Script("claim_silent")
CONFIRM = Script("confirm")
RELEASE = Script("release")
STILL_SILENT = Script("still_silent")
NOTE_EXPIRED = Script("note_expired")
TALLY = Script("tally")
FORGET_PAUSES = Script("forget_pauses")
