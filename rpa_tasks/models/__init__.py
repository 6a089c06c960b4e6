from __future__ import annotations

from rpa_tasks.models.demo import DemoOrder, DemoWatermark
from rpa_tasks.models.job import DedupeWindow, Evidence, Job, JobState, Run
from rpa_tasks.models.node import ExecutionNode
from rpa_tasks.models.platform import (
    Breaker,
    DedupeBy,
    DedupePeriod,
    Flow,
    Lane,
    LoginState,
    ParamStyle,
    Platform,
    Rerun,
    Shop,
)
from rpa_tasks.models.takeover import TakeOver, TakeOverEnd

__all__ = [
    "Breaker", "DedupeBy", "DedupePeriod", "DedupeWindow", "DemoOrder", "DemoWatermark", "Evidence", "ExecutionNode",
    "Flow", "Job", "JobState", "Lane", "LoginState", "ParamStyle", "Platform", "Rerun", "Run", "Shop",
    "TakeOver", "TakeOverEnd",
]  # fmt: skip
