"""The configuration file of a stack under test: one text, and nodes that send it at once and past all guards."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

FREE = dict.fromkeys(("cap", "dedupe", "conversation", "quiet_hours"), "ignore")
LOG = {"key": "log", "kind": "log"}
#: A shop with a flow that does nothing.
ONE_SHOP: dict[str, Any] = {
    "platforms": [{"key": "pdd", "name": "pdd"}],
    "flows": [{
        "platform": "pdd", "task_type": "look", "command": ["true", "{param}"], "timeout": "60s", "idempotent": True,
        "needs_browser": False,
    }],
    "shops": [{"platform": "pdd", "shop_id": "s1", "name": "s1"}],
}  # fmt: skip
LOOK = {"shop_id": "s1", "platform": "pdd", "task_type": "look", "payload": {}}


def small_matrix(channel: Mapping[str, Any], *nodes: Mapping[str, Any], **sections: Any) -> dict[str, Any]:
    """Nodes by one channel, with their own differences. `sections` replace those that are here."""
    node = {"stage": "s", "template": "hi", "channel": channel["key"], "delay": "0s", "guards": FREE}
    return {
        "version": 1,
        "channels": [channel],
        "templates": [{"key": "hi", "content_type": "hi", "category": "service", "body": "hi {{ user.id }}"}],
        "stages": [{"key": "s"}],
        "nodes": [{**node, **each} for each in nodes],
        "harassment_rules": [],
        **sections,
    }
