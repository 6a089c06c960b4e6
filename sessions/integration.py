"""What this app adds to `scheduling`."""

from __future__ import annotations

from scheduling.app_integrations import Integration
from sessions import metrics
from sessions.admin import chats, dashboard
from sessions.detection.presence import SessionPresence
from sessions.store import stats

INTEGRATION = Integration(
    presence=(SessionPresence(),),
    user_erasers=(stats.erase_sessions,),
    user_exporters={"live_chats": stats.export_chats},
    metrics=(metrics.read_sessions,),
    scaling={"watchers": metrics.measure_watchers},
    menu=chats.MENU,
    cards=(dashboard.live_chats_card,),
)
