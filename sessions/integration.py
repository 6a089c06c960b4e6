"""What this app adds to `scheduling`."""

from __future__ import annotations

from scheduling.app_integrations import Integration, PersonalData
from sessions import metrics
from sessions.admin import chats, dashboard
from sessions.detection.presence import SessionPresence
from sessions.store import stats

INTEGRATION = Integration(
    reasons=chats.REASONS,
    presence=(SessionPresence(),),
    personal_data=(PersonalData("live_chats", stats.export_chats, stats.erase_sessions),),
    metrics=(metrics.read_sessions,),
    scaling={"watchers": metrics.measure_watchers},
    menu=chats.MENU,
    cards=(dashboard.live_chats_card,),
)
