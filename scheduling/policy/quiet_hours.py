"""Find the end of quiet hours. Pure."""

from __future__ import annotations

from datetime import datetime, timedelta
from zoneinfo import ZoneInfo

from scheduling.policy.specs import RuleSpec


def quiet_until(rule: RuleSpec, zone: ZoneInfo, now: datetime) -> datetime | None:
    """Return when the quiet hours around `now` end, or None outside of them.

    If a clock change repeats the end, the later one counts, so that the repeated hour wakes no customer. A clock change
    can skip all the time between the end and the next start. The quiet hours then continue until the next day's end.
    """
    local = now.astimezone(zone)
    wall = local.time().replace(tzinfo=None)
    over_midnight = rule.quiet_from > rule.quiet_to
    if over_midnight:
        quiet = wall >= rule.quiet_from or wall < rule.quiet_to
    else:
        quiet = rule.quiet_from <= wall < rule.quiet_to
    if not quiet:
        return None
    end_day = local.date() + timedelta(days=1) if over_midnight and wall >= rule.quiet_from else local.date()
    end = datetime.combine(end_day, rule.quiet_to, tzinfo=zone)
    later = max(end.astimezone(now.tzinfo), end.replace(fold=1).astimezone(now.tzinfo))
    until = max(later, now + timedelta(seconds=1))
    return quiet_until(rule, zone, until) or until
