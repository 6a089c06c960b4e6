from __future__ import annotations

from scheduling.models.access import (
    INCLUDED,
    ApiKey,
    AuditEntry,
    FailedLogin,
    IdentityLink,
    Invitation,
    Pause,
    Role,
    Scope,
    SignIn,
    TotpDevice,
)
from scheduling.models.customer import (
    Community,
    Complaint,
    Customer,
    CustomerChange,
    CustomerErasure,
    CustomerImport,
    CustomerImportPart,
    CustomerProfile,
    RefusedLines,
)
from scheduling.models.event import DeliveryReceipt, Event, EventType, ReceiptKind, VendorMessage
from scheduling.models.node import (
    AtDay,
    Calendar,
    CapSwitch,
    Category,
    ChannelConfig,
    DelayRule,
    DisabledTarget,
    HarassmentRule,
    Holdout,
    Node,
    OnRepeat,
    OverCap,
    Stage,
    Switch,
    Template,
    TemplateText,
)
from scheduling.models.operations import (
    Alert,
    AlertReceiver,
    AutomaticRollout,
    BulkAction,
    ConfigDraft,
    DismissedChecklist,
    UndoableAct,
)
from scheduling.models.touch import (
    WAITING,
    Attempt,
    AttemptOutcome,
    EndMark,
    FailedTask,
    FailedTaskComment,
    GuardDecision,
    LedgerRow,
    Priority,
    Touch,
    TouchState,
    Verdict,
)
from scheduling.models.versioned import Configuration
from scheduling.models.webhooks import (
    WebhookEndpoint,
    WebhookEvent,
    WebhookFact,
    WebhookMessage,
    WebhookSubscription,
)

__all__ = [
    "INCLUDED", "WAITING", "Alert", "AlertReceiver", "ApiKey", "AtDay", "Attempt", "AttemptOutcome",
    "AuditEntry", "AutomaticRollout", "BulkAction", "Calendar", "CapSwitch", "Category", "ChannelConfig", "Community",
    "Complaint", "ConfigDraft", "Configuration", "Customer", "CustomerChange", "CustomerErasure", "CustomerImport",
    "CustomerImportPart", "CustomerProfile", "DelayRule", "DeliveryReceipt", "DisabledTarget", "DismissedChecklist",
    "EndMark", "Event", "EventType", "FailedLogin", "FailedTask", "FailedTaskComment", "GuardDecision",
    "HarassmentRule", "Holdout", "IdentityLink", "Invitation", "LedgerRow", "Node", "OnRepeat", "OverCap", "Pause",
    "Priority", "ReceiptKind", "RefusedLines", "Role",
    "Scope", "SignIn", "Stage", "Switch", "Template", "TemplateText", "TotpDevice", "Touch", "TouchState",
    "UndoableAct", "VendorMessage", "Verdict", "WebhookEndpoint", "WebhookEvent", "WebhookFact", "WebhookMessage",
    "WebhookSubscription",
]  # fmt: skip
