from __future__ import annotations

from scheduling.models.alert import Alert, AlertReceiver
from scheduling.models.api_key import INCLUDED, ApiKey, Pause, Scope, expand_scopes
from scheduling.models.bulk_action import BulkAction
from scheduling.models.customer import Community, Complaint, Customer
from scheduling.models.event import Event, EventType
from scheduling.models.failed_task import FailedTask
from scheduling.models.ledger import LEASED, WAITING, LedgerRow, Priority
from scheduling.models.login_attempt import FailedLogin
from scheduling.models.node import (
    CapSwitch,
    Category,
    ChannelConfig,
    DisabledTarget,
    Node,
    OnRepeat,
    OverCap,
    Stage,
    Switch,
    Template,
    TemplateText,
)
from scheduling.models.replay import WhatIfRun
from scheduling.models.rollout import GuardedRollout, RolloutMove
from scheduling.models.rule import DelayRule, HarassmentRule
from scheduling.models.saved_filter import SavedFilter
from scheduling.models.touch import Attempt, Touch, TouchState, Verdict
from scheduling.models.versioned import Configuration

__all__ = [
    "INCLUDED", "LEASED", "WAITING", "Alert", "AlertReceiver", "ApiKey", "Attempt", "BulkAction", "CapSwitch",
    "Category",
    "ChannelConfig", "Community", "Complaint", "Configuration", "Customer", "DelayRule", "DisabledTarget", "Event",
    "EventType", "FailedLogin", "FailedTask", "GuardedRollout", "HarassmentRule", "LedgerRow", "Node", "OnRepeat",
    "OverCap", "Pause", "Priority", "RolloutMove", "SavedFilter", "Scope", "Stage", "Switch", "Template",
    "TemplateText", "Touch", "TouchState", "Verdict", "WhatIfRun", "expand_scopes",
]  # fmt: skip
