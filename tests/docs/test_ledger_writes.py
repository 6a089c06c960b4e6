"""Only the ledgers lock, insert, change or delete rows of touches and jobs."""

import re

from config.environment import ROOT
from tests.docs.test_layout import PRODUCT

LEDGERS = ("scheduling/ledger/", "rpa_tasks/jobs/")
TABLES = r"(?:scheduling_touch|rpa_tasks_job)\b"
WRITES = re.compile(
    rf"\b(?:UPDATE|INSERT INTO|COPY|DELETE FROM|MERGE INTO)\s+(?:ONLY\s+)?{TABLES}"
    rf"|\bFROM\s+{TABLES}(?:\s+AS\s+(?P<row>\w+))?(?:(?!\bFROM\b)[^;])*?"
    r"\bFOR\s+(?:NO KEY )?UPDATE\b(?:\s+OF\s+(?P<locked>\w+))?"
    r"|\b(?:Touch|Job)\.objects\b[^\n]*\.(?:update|delete|create|bulk_create|bulk_update|select_for_update)\("
)


def test_only_ledgers_write_touch_and_job_rows():
    outside, of_ledgers = [], 0
    for app in PRODUCT:
        for path in sorted((ROOT / app).rglob("*.py")):
            name = path.relative_to(ROOT).as_posix()
            matches = WRITES.finditer(path.read_text("utf-8"))
            writes = [found.group()[:60] for found in matches if found["locked"] in (None, found["row"])]
            if name.startswith(LEDGERS):
                of_ledgers += len(writes)
            elif "/migrations/" not in name:
                outside += [f"{name}: {write}" for write in writes]
    assert outside == []
    assert of_ledgers >= 10
