"""Revoke tokens of sessions. The clock of the session's shard in Redis orders its tokens and revocations.

A revocation is kept as long as a token can live. It is lost with the data of Redis. Raises `StoreUnavailable` like the
store.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import NamedTuple

from sessions.store import client
from sessions.store.client import Server, decode_text, read_script

MAX_LIFETIME = timedelta(hours=1)  #: of a token
REVOKE = read_script("revoke")
#: Where processes of a release without revocations by shard write. During an upgrade and the hour after it, it counts.
UNSHARDED = "{at:revoked}"


class Revocation(NamedTuple):
    session_id: str
    side: str
    at: int  #: µs; tokens issued before are revoked


def read_issue_time(server: Server, session_id: str) -> int:
    """Return the time of a new token, µs. It is later than every earlier revocation of the session."""
    return _run(server, session_id, [])


def revoke_tokens(server: Server, session_id: str, sides: Sequence[str]) -> int:
    """Revoke the tokens issued for these sides of a session. Idempotent. Returns the time, µs."""
    return _run(server, session_id, [_member(session_id, side) for side in sides])


def is_revoked(server: Server, session_id: str, side: str, issued_at: int) -> bool:
    """Return whether a revocation is later than the token. One of another layout counts while its node answers."""
    member, key = _member(session_id, side), client.REVOKED[client.shard_of(session_id)]
    (at,) = server.ask(lambda pipe: [pipe.zscore(key, member)])
    if at is None or at <= issued_at:
        (at,) = server.ask(lambda pipe: [pipe.zscore(UNSHARDED, member)], partly=True)
    return at is not None and at > issued_at


def list_revocations(server: Server, after: Sequence[int]) -> list[list[Revocation]]:
    """Return the revocations of each shard after its time, µs, oldest first. Leaves out an unavailable node."""
    found = server.ask(
        lambda pipe: [
            pipe.zrangebyscore(key, f"({at}", "+inf", withscores=True)
            for key, at in zip(client.REVOKED, after, strict=True)
        ],
        partly=True,
    )
    return [[_parse_revocation(decode_text(name), int(at)) for name, at in members or ()] for members in found]


def _parse_revocation(member: str, at: int) -> Revocation:
    session_id, _, side = member.rpartition("\n")
    return Revocation(session_id, side, at)


def _run(server: Server, session_id: str, members: Sequence[str]) -> int:
    key = client.REVOKED[client.shard_of(session_id)]
    (at,) = server.run([(REVOKE, [key], [MAX_LIFETIME // timedelta(microseconds=1), *members])])
    return int(at)


def _member(session_id: str, side: str) -> str:
    return f"{session_id}\n{side}"
