"""Library for flows. A flow is a Python file with a function `run`:

    from rpa_tasks.flow_sdk import Flow, PlatformError

    def run(flow: Flow) -> dict[str, Any]:
        flow.page.goto(flow.text("site"))
        …
        return {"read": 12}

No module here imports Django, because a flow must start fast and may run on a machine that only has its browser.
"""

from __future__ import annotations

from rpa_tasks.flow_sdk.flow import BusinessError, Flow, FlowError, Misused, PlatformError, SessionExpired, Transient

__all__ = ["BusinessError", "Flow", "FlowError", "Misused", "PlatformError", "SessionExpired", "Transient"]
