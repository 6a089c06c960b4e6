"""The differences between two copies of a document are put on top of a third one."""

from __future__ import annotations

from typing import Any

import pytest

from scheduling.experiments.replay.merging import merge_documents

CAP = {"kind": "cap", "limit": 3, "window": "24h"}
WEEK = {"kind": "cap", "limit": 9, "window": "7d"}
QUIET = {"kind": "quiet_hours", "from": "22:00", "to": "08:00"}
ZH = {"key": "a", "content_type": "a", "locale": "zh-hans", "body": "你好"}
ZH_B, EN_B = {**ZH, "content_type": "b"}, {"key": "a", "content_type": "b", "locale": "en", "body": "Hello"}
EN = {"key": "a", "content_type": "a", "locale": "en", "body": "Hello"}
VIP, OLD = {"all": [{"field": "customer.level", "is": "vip"}]}, {"any": [{"field": "customer.level", "is": "old"}]}


def rules(*entries: dict[str, Any]) -> dict[str, Any]:
    return {"harassment_rules": list(entries)}


@pytest.mark.parametrize(
    ("base", "edited", "onto", "merged"),
    [
        pytest.param({"nodes": [{"key": "a", "delay": "1h"}]}, {"nodes": [{"key": "a", "delay": "2h"}]},
                     {"nodes": [{"key": "b"}, {"key": "a", "delay": "1h", "tags": ["x"]}]},
                     {"nodes": [{"key": "b"}, {"key": "a", "delay": "2h", "tags": ["x"]}]}, id="one field"),
        pytest.param({"nodes": [{"key": "a", "tags": ["x"]}]}, {"nodes": [{"key": "a"}]},
                     {"nodes": [{"key": "a", "tags": ["x"], "delay": "1h"}]},
                     {"nodes": [{"key": "a", "delay": "1h"}]}, id="a field that becomes its default"),
        pytest.param({"nodes": [{"key": "a"}]}, {"nodes": [{"key": "a", "rollout": {"percent": 5}}]},
                     {"nodes": [{"key": "a", "rollout": {"communities": ["c"]}}]},
                     {"nodes": [{"key": "a", "rollout": {"communities": ["c"], "percent": 5}}]}, id="a group"),
        pytest.param({"nodes": [{"key": "a"}]}, {"nodes": [{"key": "a", "when": VIP}]},
                     {"nodes": [{"key": "a", "when": OLD}]},
                     {"nodes": [{"key": "a", "when": VIP}]}, id="conditions as a whole"),
        pytest.param({"nodes": [{"key": "a", "send_window": {"from": "09:00", "to": "18:00"}}]},
                     {"nodes": [{"key": "a", "send_window": {"from": "09:00", "to": "10:00"}}]},
                     {"nodes": [{"key": "a", "send_window": {"from": "12:00", "to": "18:00", "calendar": "own"}}]},
                     {"nodes": [{"key": "a", "send_window": {"from": "09:00", "to": "10:00"}}]},
                     id="a send window as a whole"),
        pytest.param({"nodes": [{"key": "a"}, {"key": "b"}]}, {"nodes": [{"key": "b"}]},
                     {"nodes": [{"key": "a"}, {"key": "b"}, {"key": "c"}]},
                     {"nodes": [{"key": "b"}, {"key": "c"}]}, id="a retired row"),
        pytest.param({"holdout": {"percent": 0}}, {"holdout": {"percent": 5}}, {"holdout": {"percent": 0, "key": "y"}},
                     {"holdout": {"percent": 5, "key": "y"}}, id="a section of one row"),
        pytest.param({"templates": [ZH]}, {"templates": [ZH_B]}, {"templates": [ZH, EN]},
                     {"templates": [ZH_B, EN_B]}, id="a field of all texts"),
        pytest.param({"templates": [ZH]}, {"templates": [ZH, EN]}, {"templates": [{**ZH, "body": "您好"}]},
                     {"templates": [{**ZH, "body": "您好"}, EN]}, id="another text"),
        pytest.param(rules(CAP, WEEK), rules(CAP, {**WEEK, "limit": 5}), rules({**CAP, "limit": 1}, WEEK),
                     rules({**CAP, "limit": 1}, {**WEEK, "limit": 5}), id="the second of two caps"),
        pytest.param(rules(CAP, WEEK), rules(CAP, {**WEEK, "limit": 5}), rules(WEEK, QUIET),
                     rules({**WEEK, "limit": 5}, QUIET), id="a cap that moved"),
        pytest.param(rules(CAP), rules(CAP, QUIET), rules(CAP, QUIET), rules(CAP, QUIET), id="a rule that both add"),
        pytest.param(rules(CAP), rules(CAP, WEEK), rules(CAP, {**WEEK, "limit": 7}),
                     rules(CAP, {**WEEK, "limit": 7}, WEEK), id="two rules that are added"),
    ],
)  # fmt: skip
def test_merge_documents_puts_the_edit_on_top(base: Any, edited: Any, onto: Any, merged: Any) -> None:
    assert merge_documents(base, edited, onto) == merged


def test_merge_documents_without_an_edit_changes_nothing() -> None:
    onto = {"version": 1, "nodes": [{"key": "b", "delay": "5m"}], **rules(WEEK)}
    assert merge_documents(onto, onto, onto) == onto
    assert merge_documents({"nodes": []}, {"nodes": []}, onto) == onto
