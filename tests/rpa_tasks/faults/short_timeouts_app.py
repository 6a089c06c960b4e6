"""The product's Celery with a runner that counts shorter times: `FAULTS_TIMES` names them. Nothing else differs."""

from __future__ import annotations

import json
import os
from datetime import timedelta
from typing import Any

from celery.signals import worker_process_init

from config.celery.application import app

__all__ = ["app"]


@worker_process_init.connect
def apply_short_times(**_: Any) -> None:
    from rpa_tasks.worker import runner

    for name, seconds in json.loads(os.environ.get("FAULTS_TIMES", "{}")).items():
        assert hasattr(runner, name), name
        setattr(runner, name, timedelta(seconds=seconds) if name == "LEASE" else float(seconds))
