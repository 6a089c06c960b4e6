"""An instant and the values around it, as pages show them; `tests/language` reads all pages."""

from __future__ import annotations

import re
from datetime import UTC, datetime

from pytest_django import Settings

from scheduling.admin.shown_values import describe_instant, format_instant, insert_values
from tests.support.tables import each_row


@each_row("zone", ["Asia/Shanghai", "America/New_York"])
def test_instant_has_the_offset_of_the_installation(zone: str, settings: Settings) -> None:
    settings.TIME_ZONE = zone
    summer, winter = datetime(2026, 7, 1, tzinfo=UTC), datetime(2026, 12, 1, tzinfo=UTC)
    assert [describe_instant(at) for at in (summer, winter)] == {
        "Asia/Shanghai": ["2026-07-01 08:00:00 +08:00", "2026-12-01 08:00:00 +08:00"],
        "America/New_York": ["2026-06-30 20:00:00 -04:00", "2026-11-30 19:00:00 -05:00"],
    }[zone]
    assert datetime.fromisoformat(re.findall(r'datetime="(.+?)"', format_instant(summer))[0]) == summer


def test_inserted_values_keep_their_markup_and_texts_are_escaped() -> None:
    shown = insert_values("a < %(name)s at %(time)s", name="<b>", time=format_instant(datetime(2026, 7, 1, tzinfo=UTC)))
    assert shown.startswith('a &lt; &lt;b&gt; at <time datetime="2026-07-01T08:00:00+08:00" title="2026-07-01 08:00:00')
    assert format_instant(None) == "–"
