"""Count the effect of guide messages: sent, answered and false.

*Sent*: the channel delivered a message into a silence. *Answered*: the user wrote within ten minutes. *False*: the
message was not needed. The user wrote or typed within two seconds, or was typing at that moment. Typing means a
typing frame in the ten seconds before, without a message since. A false message is not counted as answered. An action
of the user counts for the latest message into their silence.

Two seconds are too short to compare two clocks. The store's clock measures the time from the last `note_sending` call,
right before the message, to the user's action. The database's clock measures the time from the mark right before that
call, `sending_at`, to the delivery.

The store keeps one field per session and a stream of signals per shard, at most 10,000 entries. A pass every ten
seconds reads and trims the stream. The position is stored with the counts, so each signal counts once. A flushed store
loses the signals of about the last minute and the future ones of messages already sent. The number sent comes from the
database and is not lost. Gateways known only by expiring keys give no signals.
"""

from __future__ import annotations

from contextlib import suppress
from datetime import timedelta
from typing import Any, NamedTuple

import structlog
from django.db import transaction

from scheduling import sql
from scheduling.ledger import ends
from sessions.detection.presence import SILENT
from sessions.detection.silence_events import SOURCE
from sessions.models import NudgeMark, NudgeTally
from sessions.store import client
from sessions.store.client import StoreUnavailable, decode_text
from sessions.store.sessions import Store, live_store

log = structlog.get_logger(__name__)

FALSE_WITHIN = timedelta(seconds=2)
#: See `ends.WRITE_LAG`.
WRITE_LAG = timedelta(seconds=1)
SETTLED = timedelta(seconds=60)  #: after this time a message that was being sent is settled
MOST_SENT, MOST_SIGNALS = 20_000, 1_000  #: touches per pass; signals per shard and pass
RETENTION = timedelta(days=90)


class NudgeSignal(NamedTuple):
    shard: int
    id: str  #: of its entry in the stream
    silence: str  #: id of its event
    kind: str  #: m: message, t: typing
    after_ms: int
    typed_ms: int | None  #: of a message: time to the user's first typing


def count_effects(store: Store | None = None) -> None:
    """Count everything new since the last pass. Concurrent passes are safe: one counts, the others return."""
    store = store or live_store()
    # The stored position. A new deployment starts now.
    at = sql.now()
    before = NudgeMark.objects.get_or_create(pk=1, defaults={"counted_to": at, "ceiling": at})[0].signs_to
    try:
        signals = _read_signals(store, before)
    except StoreUnavailable as error:
        log.warning("nudge_signals_not_read", error=str(error))
        signals = []
    with transaction.atomic():
        mark = NudgeMark.objects.select_for_update(skip_locked=True).filter(pk=1).first()
        if mark is None or mark.signs_to != before:
            return
        _count_sent(mark)
        _count_signals(signals)
        mark.signs_to = before | {str(each.shard): each.id for each in signals}
        mark.save()
        sql.execute("DELETE FROM chat_sessions_nudgetally WHERE at < now() - %(kept)s", {"kept": RETENTION})
    if signals:
        # Trim counted signals from the streams. The next pass repeats a failed trim.
        with suppress(StoreUnavailable):
            store.server.ask(
                lambda pipe: [
                    pipe.xtrim(client.SIGNALS[int(shard)], minid=name, approximate=False)
                    for shard, name in mark.signs_to.items()
                ]
            )


def _read_signals(store: Store, before: dict[str, str]) -> list[NudgeSignal]:
    """Return the oldest signals that are not yet counted. Raises `StoreUnavailable`."""
    (seconds, micros), *found = store.server.ask(
        lambda pipe: [
            pipe.time(),
            *(pipe.xrange(client.SIGNALS[shard], f"({before.get(str(shard), '0-0')}", "+", count=MOST_SIGNALS)
              for shard in range(client.SHARDS)),
        ]
    )  # fmt: skip
    until = seconds * 1000 + micros // 1000 - SETTLED // timedelta(milliseconds=1)
    signals = []
    for shard, entries in enumerate(found):
        for name, fields in entries:
            entry = decode_text(name)
            if int(entry.partition("-")[0]) <= until:
                words = {decode_text(field): decode_text(value) for field, value in fields.items()}
                typed = int(words["f"]) if words["f"] else None
                signals.append(NudgeSignal(shard, entry, words["e"], words["k"], int(words["d"]), typed))
    return signals


def _count_sent(mark: NudgeMark) -> None:
    """Count deliveries up to a ceiling below which no transaction still writes. Then set the next ceiling."""
    newest, own, oldest = ends.read_horizon(WRITE_LAG)
    if mark.ceiling_xid > own:  # a transaction id of another cluster: this database was restored from it
        mark.ceiling, mark.ceiling_xid = max(newest, mark.counted_to), own
    if oldest >= mark.ceiling_xid:
        span = {"after": mark.counted_to, "until": mark.ceiling}
        ((until,),) = sql.rows(_CEILING, {**span, "most": MOST_SENT})
        sql.execute(_SENT, {**span, "until": until, "source": SOURCE, "type": SILENT})
        mark.counted_to = until
        if until == mark.ceiling:
            mark.ceiling, mark.ceiling_xid = max(newest, until), own


def _count_signals(signals: list[NudgeSignal]) -> None:
    if not signals:
        return
    words: dict[str, Any] = {
        "silences": [each.silence for each in signals],
        "kinds": [each.kind for each in signals],
        "afters": [each.after_ms for each in signals],
        "typed": [-1 if each.typed_ms is None else each.typed_ms for each in signals],
        "source": SOURCE,
        "too_soon": FALSE_WITHIN,
    }
    sql.execute(_SIGNALS, words)


def recent_tallies(span: timedelta = timedelta(hours=24), *, by_version: bool = False) -> list[NudgeTally]:
    """Return counts of messages delivered within `span` by policy, or by version of a policy, the newest first."""
    names = ("policy", "policy_version") if by_version else ("policy",)
    found = sql.rows(
        f"""
        SELECT {", ".join(names)}, sum(sent)::bigint AS sent, sum(answered)::bigint, sum("false")::bigint
        FROM chat_sessions_nudgetally WHERE at > now() - %(span)s
        GROUP BY {", ".join(names)} ORDER BY {"policy, policy_version DESC" if by_version else "sent DESC, policy"}
        """,  # noqa: S608  constants
        {"span": span},
    )
    columns = (*names, "sent", "answered", "false")
    return [NudgeTally(**dict(zip(columns, row, strict=True))) for row in found]


# A pass counts all touches of its last instant, so it may count more.
_CEILING = """
SELECT COALESCE((
    SELECT settled_at FROM scheduling_touch_ended WHERE settled_at > %(after)s AND settled_at <= %(until)s
    ORDER BY settled_at OFFSET %(most)s LIMIT 1
), %(until)s)
"""

_POLICY = """
COALESCE(event.data ->> 'policy', 'default') AS policy, COALESCE((event.data ->> 'policy_version')::int, 1) AS version
"""
_BUCKET = "date_bin('5 minutes', touch.settled_at, '2000-01-01')"
_ADD = """
ON CONFLICT (at, policy, policy_version) DO UPDATE SET sent = tally.sent + excluded.sent,
    answered = tally.answered + excluded.answered, "false" = tally."false" + excluded."false"
"""

_SENT = f"""
INSERT INTO chat_sessions_nudgetally AS tally (at, policy, policy_version, sent, answered, "false")
SELECT {_BUCKET}, {_POLICY}, count(*), 0, 0
FROM scheduling_touch_ended AS touch JOIN scheduling_event AS event ON event.id = touch.event_id
WHERE touch.settled_at > %(after)s AND touch.settled_at <= %(until)s AND touch.state = 'delivered'
    AND event.source = %(source)s AND event.type = %(type)s
GROUP BY 1, 2, 3
{_ADD}
"""  # noqa: S608  constants

_SIGNALS = f"""
WITH signal AS (
    SELECT * FROM unnest(%(silences)b::text[], %(kinds)b::text[], %(afters)b::bigint[], %(typed)b::bigint[])
        WITH ORDINALITY AS signal (silence, kind, after, typed, number)
), judged AS (
    SELECT DISTINCT ON (signal.number) {_BUCKET} AS at, {_POLICY}, signal.kind, signal.after,
        nullif(signal.typed, -1) AS typed,
        extract(epoch FROM %(too_soon)s + greatest(last.ended_at - touch.sending_at, interval '0')) * 1000 AS bound
    FROM signal
    JOIN scheduling_event AS event ON event.source = %(source)s AND event.event_id = signal.silence
    CROSS JOIN LATERAL (
        SELECT settled_at, sending_at, attempts FROM scheduling_touch_ended
        WHERE event_id = event.id AND state = 'delivered' ORDER BY settled_at DESC LIMIT 1
    ) AS touch
    CROSS JOIN LATERAL touch_attempts(touch.attempts) AS last
    WHERE last.outcome = 'delivered'
    ORDER BY signal.number, last.ended_at DESC
), counted AS (
    SELECT at, policy, version, count(*) FILTER (WHERE kind = 'm' AND least(after, typed) > bound) AS answered,
        count(*) FILTER (WHERE after <= bound AND (kind = 't' OR typed IS NULL)) AS "false"
    FROM judged GROUP BY at, policy, version
)
INSERT INTO chat_sessions_nudgetally AS tally (at, policy, policy_version, sent, answered, "false")
SELECT at, policy, version, 0, answered, "false" FROM counted WHERE answered + "false" > 0
{_ADD}
"""  # noqa: S608  constants
