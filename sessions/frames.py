"""Define the frames of a chat and validate them. No I/O."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from scheduling.errors import ErrorCollector
from scheduling.ids import find_user_id_problem

USER, AGENT = "user", "agent"
#: A ping reports that the page is open; a close ends the session. Every other kind is activity of the user.
USER_KINDS = frozenset({"message", "typing", "read", "ping", "close"})
#: `tool`, `transfer` and `queue` pause until the agent's next message or `resume`; so does `typing`, for two minutes.
AGENT_KINDS = frozenset({"message", "typing", "tool", "transfer", "queue", "resume", "ping", "close"})
KINDS = {USER: USER_KINDS, AGENT: AGENT_KINDS}

ID_LENGTH = 128  #: of a session id; an event id is that plus an arming
USER_LENGTH = CHAT_LENGTH = 200
TAG_LENGTH = EPOCH_LENGTH = 64
MOST_TAGS = 8  #: of a session, besides `tag`
MAX_SEQ = 2**53 - 1  #: largest integer that JSON and Lua represent exactly

OTHER_USER = "must be the user of this session, in frames of the agent as well"

_UNSTORABLE = re.compile("[\x00-\x1f\x7f\ud800-\udfff]")


@dataclass(frozen=True, slots=True)
class Frame:
    """One frame of one side of a session. Raises `InvalidInput`.

    `user_id` is the session's user, also in frames of the agent. `seq` increases over the life of the session,
    separately for each side. A frame whose seq is not above the last is dropped. A frame without seq always counts. A
    new `epoch` restarts the counter.
    """

    session_id: str
    user_id: str
    chat_id: str = ""
    sender: str = USER
    kind: str = "message"
    seq: int | None = None
    tag: str = ""  #: "" and no `tags`: the session's tags, else "default"
    epoch: str = ""  #: of the counter; "": the current one
    spoken: bool = False  #: the user has written before, so their ping starts the timer of a session that Redis lost
    first_tag: bool = False  #: the tags apply only to a session without any
    tags: Sequence[str] = ()  #: together with `tag` all tags of the session

    def __post_init__(self) -> None:
        if self._fits():
            return
        found = ErrorCollector()
        for name, longest, least in _TEXTS:
            _check_text(found, name, getattr(self, name), longest, least)
        if isinstance(self.user_id, str) and (problem := find_user_id_problem(self.user_id)):
            found.add("user_id", problem)
        if not isinstance(self.tags, (list, tuple)) or len(self.tags) > MOST_TAGS:
            found.add("tags", f"must be a list of at most {MOST_TAGS} tags")
        else:
            for place, tag in enumerate(self.tags):
                _check_text(found, f"tags.{place}", tag, TAG_LENGTH, 1)
        if self.sender not in KINDS:
            found.add("from", "must be user or agent")
        elif self.kind not in KINDS[self.sender]:
            found.add("kind", f"must be one of {', '.join(sorted(KINDS[self.sender]))}")
        if self.seq is not None and not (type(self.seq) is int and 0 <= self.seq <= MAX_SEQ):
            found.add("seq", f"must be a whole number between 0 and {MAX_SEQ}")
        found.raise_if_any()

    def _fits(self) -> bool:
        """Check all fields in one expression. This runs for every frame of 100,000 chats; errors are formatted
        separately.
        """
        texts = (self.session_id, self.user_id, self.chat_id, self.tag, self.epoch)
        return (
            all(type(text) is str for text in texts)
            and 0 < len(self.session_id) <= ID_LENGTH
            and 0 < len(self.user_id) <= USER_LENGTH
            and len(self.chat_id) <= CHAT_LENGTH
            and len(self.tag) <= TAG_LENGTH
            and len(self.epoch) <= EPOCH_LENGTH
            and self.kind in KINDS.get(self.sender, ())
            and (self.seq is None or (type(self.seq) is int and 0 <= self.seq <= MAX_SEQ))
            and not _UNSTORABLE.search("".join(texts))
            and not find_user_id_problem(self.user_id)
            and type(self.tags) in (list, tuple)
            and len(self.tags) <= MOST_TAGS
            and all(map(is_tag, self.tags))
        )

    @property
    def seq_in_epoch(self) -> int | str:
        """Return the seq as the scripts compare it: empty, `seq` or `seq@epoch`."""
        if self.seq is None:
            return ""
        return f"{self.seq}@{self.epoch}" if self.epoch else self.seq

    @property
    def joined_tags(self) -> str:
        """Return all tags, sorted and separated by newlines, as the store keeps them."""
        return "\n".join(sorted({self.tag, *self.tags} - {""})) if self.tags else self.tag


_TEXTS = (
    ("session_id", ID_LENGTH, 1),
    ("user_id", USER_LENGTH, 1),
    ("chat_id", CHAT_LENGTH, 0),
    ("tag", TAG_LENGTH, 0),
    ("epoch", EPOCH_LENGTH, 0),
)


def _check_text(found: ErrorCollector, name: str, text: object, longest: int, least: int) -> None:
    if not isinstance(text, str):
        found.add(name, "must be text")
    elif not least <= len(text) <= longest:
        found.add(name, f"must have between {least} and {longest} characters")
    elif _UNSTORABLE.search(text):
        found.add(name, "must not have control characters or half a character")


def has_control_characters(text: str) -> bool:
    return bool(_UNSTORABLE.search(text))


def is_tag(given: object) -> bool:
    return type(given) is str and 0 < len(given) <= TAG_LENGTH and not _UNSTORABLE.search(given)


def check_id(session_id: str) -> None:
    """Validate a session id. Raises `InvalidInput`."""
    found = ErrorCollector()
    _check_text(found, "session_id", session_id, ID_LENGTH, 1)
    found.raise_if_any()
