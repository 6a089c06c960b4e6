"""The tiers of tests: which run with `make test`, `make processes`, `make faults` and `make campaigns`.

A test without one of the markers below belongs to `make test`: it kills nothing and starts no stack of its own. The
exceptions are the smoke tests in tests/smoke. A test has the tier of its folder or file, or of a marker of its own.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from config.environment import ROOT

MAKE_TEST = "not (processes or faults or campaign)"  #: see Makefile

#: Run by `make faults`: each fault once.
FAULTS = (
    "tests/faults/", "tests/rpa_tasks/faults/", "tests/sessions/faults/",
    "tests/deploy/test_keep_the_data.py",
    "tests/local_stack/test_process_cleanup.py",
    "tests/rpa_tasks/browsers/test_take_over_faults.py",
)  # fmt: skip
#: Run by `make processes`: stacks, supervisors, browsers, servers and programs of a test's own.
PROCESSES = (
    "tests/deploy/test_containers.py", "tests/deploy/test_pgbouncer.py", "tests/deploy/test_prometheus.py",
    "tests/deploy/test_redis_users.py", "tests/deploy/test_scraping.py", "tests/deploy/test_systemd.py",
    "tests/deploy/test_upgrade.py",
    "tests/docs/test_walkthroughs.py",
    "tests/journeys/",
    "tests/local_stack/",
    "tests/rpa_tasks/browsers/", "tests/rpa_tasks/flow/", "tests/rpa_tasks/isolation/",
    "tests/rpa_tasks/supervisor/test_command_end.py", "tests/rpa_tasks/supervisor/test_leftover_processes.py",
    "tests/rpa_tasks/supervisor/test_orphans.py", "tests/rpa_tasks/supervisor/test_supervised_command.py",
    "tests/scheduling/admin/test_read_replica.py",
    "tests/security/test_flower.py", "tests/security/test_incomplete_requests.py", "tests/security/test_nginx.py",
    "tests/security/test_tls.py",
    "tests/sessions/test_cluster.py", "tests/sessions/test_lost_primary.py",
    "tests/sessions/websocket/test_chat_page.py",
)  # fmt: skip

#: Files of ledger, fences, races, rights, redaction and consent. A wrong result of one is a defect, however rare.
PROOFS = (
    "tests/docs/test_ledger_writes.py",
    "tests/rpa_tasks/core/test_fences.py", "tests/rpa_tasks/core/test_pick.py",
    "tests/scheduling/core/test_caps.py", "tests/scheduling/core/test_consent.py",
    "tests/scheduling/core/test_guards.py", "tests/scheduling/core/test_invariants.py",
    "tests/scheduling/core/test_ledger.py", "tests/scheduling/core/test_lock_order.py",
    "tests/scheduling/core/test_random_lifecycles.py", "tests/scheduling/core/test_undo_races.py",
    "tests/scheduling/replay/test_draft_races.py",
    "tests/security/test_admin_rights.py", "tests/security/test_api_scopes.py",
    "tests/security/test_entry_points.py", "tests/security/test_redaction.py", "tests/security/test_secrets.py",
    "tests/sessions/test_races.py",
)  # fmt: skip


def pytest_configure() -> None:
    gone = [path for path in (*FAULTS, *PROCESSES, *PROOFS) if not (ROOT / path).exists()]
    assert not gone, f"tests/support/tiers.py names {gone}"


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """`make test` imports no module of another tier."""
    if config.option.markexpr != MAKE_TEST or ROOT not in collection_path.parents:
        return None
    path = collection_path.relative_to(ROOT).as_posix() + ("/" if collection_path.is_dir() else "")
    return True if path.startswith((*FAULTS, *PROCESSES)) else None


@pytest.hookimpl(tryfirst=True)  # before pytest selects by `-m`
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        tier = choose_tier(item)
        if tier == "campaign":  # whatever a parameter of it needs, it is in no other tier
            item.own_markers[:] = [each for each in item.own_markers if each.name not in ("processes", "faults")]
        if tier and item.get_closest_marker(tier) is None:
            item.add_marker(tier)
        if item.nodeid.startswith(PROOFS):
            item.add_marker("proof")


def choose_tier(item: pytest.Item) -> str | None:
    """Return the tier to mark; None for `make test`, and where a marker of the test names its tier."""
    if item.get_closest_marker("campaign"):
        return "campaign"
    path = item.nodeid.split("::", 1)[0]
    if path.startswith(FAULTS):
        return "faults"
    if path.startswith(PROCESSES):
        return "processes"
    return None
