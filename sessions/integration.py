"""What this app adds to `scheduling`."""

from __future__ import annotations

from scheduling.app_integrations import Integration
from sessions import metrics, scaling
from sessions.admin import dashboard, labels
from sessions.detection.presence import SessionPresence
from sessions.store import personal_data

INTEGRATION = Integration(
    presence=(SessionPresence(),),
    user_erasers=(personal_data.erase_sessions,),
    user_exporters={"live_chats": personal_data.export_chats},
    metrics=(metrics.NudgeMetrics, metrics.SessionMetrics),
    scaling={"watchers": scaling.measure_watchers},
    menu=labels.MENU,
    cards=(dashboard.live_chats_card,),
)
