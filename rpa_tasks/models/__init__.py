from __future__ import annotations

from rpa_tasks.models.demo import DemoOrder, DemoWatermark
from rpa_tasks.models.job import Evidence, Job, JobState, Run
from rpa_tasks.models.node import ExecutionNode
from rpa_tasks.models.platform import Breaker, DedupeBy, Flow, Lane, LoginState, Platform, Shop
from rpa_tasks.models.round import ScheduledRound

__all__ = [
    "Breaker", "DedupeBy", "DemoOrder", "DemoWatermark", "Evidence", "ExecutionNode", "Flow", "Job", "JobState", "Lane",
    "LoginState", "Platform", "Run", "ScheduledRound", "Shop",
]  # fmt: skip
