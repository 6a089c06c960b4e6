"""What a flow of one's own is written with. A flow is a Python file with a `run`:

    from rpa_tasks.flow_sdk import Flow, PlatformError

    def run(flow: Flow) -> dict[str, Any]:
        flow.page.goto(flow.text("site"))
        …
        return {"read": 12}

Nothing here imports Django: a flow has to begin within the blink of an eye, and may run where only its browser is.
"""

from __future__ import annotations

from rpa_tasks.flow_sdk.errors import BusinessError, FlowError, Misused, PlatformError, SessionExpired, Transient
from rpa_tasks.flow_sdk.flow import Flow

__all__ = ["BusinessError", "Flow", "FlowError", "Misused", "PlatformError", "SessionExpired", "Transient"]
