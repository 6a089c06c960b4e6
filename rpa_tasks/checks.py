"""System checks of RPA: isolation of commands, the browser, and programs of flows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from django.conf import settings
from django.core.checks import CheckMessage, Error, Tags, Warning, register
from django.db import connections

from rpa_tasks import isolation
from rpa_tasks.browsers.launch import NoBrowser, NoProgram, OnlySnap, find_program
from rpa_tasks.models import Flow
from rpa_tasks.supervisor.command import check_program, check_words


@register
def check_isolation(**_: Any) -> list[CheckMessage]:
    """Check the isolation on a machine that runs jobs.

    In production only the role execution shows that. A worker of any role checks again when it starts.
    """
    if not _runs_jobs() or not (problem := isolation.find_problem()):
        return []
    kind, number = (Error, "E002") if settings.AFTERTOUCH_RPA_ISOLATION_REQUIRED else (Warning, "W002")
    return [
        kind(
            f"Commands of flows can read this application's secrets and other shops' logins. {problem}.",
            hint="Install bubblewrap and allow its namespaces, or set AFTERTOUCH_RPA_ISOLATION=none on purpose.",
            id=f"rpa_tasks.{number}",
        )
    ]


def _runs_jobs() -> bool:
    return settings.AFTERTOUCH_ROLE == "execution" or (
        settings.AFTERTOUCH_ROLE == "all" and not settings.AFTERTOUCH_RPA_ISOLATION_REQUIRED
    )


@register
def check_browser_program(**_: Any) -> list[CheckMessage]:
    """Check that the browser is no snap on a machine that runs jobs. A worker checks again when it starts."""
    return browser_gaps() if _runs_jobs() else []


def browser_gaps() -> list[CheckMessage]:
    """Return an error about a browser of snap that the setting names, or a warning about one that would be found."""
    try:
        find_program(settings.RPA_CHROMIUM_PATH)
    except OnlySnap as error:
        kind, number = (Error, "E003") if settings.RPA_CHROMIUM_PATH else (Warning, "W007")
        return [kind(error.detail, id=f"rpa_tasks.{number}")]
    except NoProgram:
        pass  # flows without a browser run here
    return []


@register(deploy=True)
def check_browser_sandbox(**_: Any) -> list[CheckMessage]:
    """Check that Chromium runs with its sandbox on a machine that runs browsers. It opens pages of other parties."""
    if not _runs_jobs():
        return []
    from rpa_tasks.browsers import chromium  # a web process does not import the browsers until this check runs

    try:
        chromium.find_chromium()
        obstacle = chromium.find_sandbox_obstacle()
    except (isolation.CannotIsolate, NoBrowser):
        return []  # other checks report them; without Chromium nothing runs
    if not obstacle:
        return []
    return [
        Warning(
            f"Chromium runs with --no-sandbox, because {obstacle}: a page can take over the browser's process.",
            hint="Run execution workers as an ordinary user or with bubblewrap, and allow user namespaces.",
            id="rpa_tasks.W006",
        )
    ]


@register(Tags.database)
def check_flow_programs(databases: Sequence[str] | None = None, **_: Any) -> list[CheckMessage]:
    """Check the command of every active flow on this machine.

    Runs at each `migrate`, and with `check --database default`. Use the latter on every execution node, because
    programs differ per machine.
    """
    if "default" not in (databases or ()) or not _tables_are_migrated():
        return []
    flows = Flow.objects.filter(retired_at=None, platform__retired_at=None).select_related("platform")
    return [
        Warning(
            f"The command of flow {flow.name} does not work here: {problem}.",
            hint="Correct the flow's command, or install the program on this machine.",
            id="rpa_tasks.W001",
        )
        for flow in flows
        if (problem := "; ".join(check_words(flow.command)) or check_program(flow.command[0], flow.path, flow.cwd))
    ]


def _tables_are_migrated() -> bool:
    """Return whether the table and all columns exist. At the first `migrate` or in an upgrade they may not."""
    connection = connections["default"]
    with connection.cursor() as cursor:
        tables = connection.introspection.table_names(cursor)
        if Flow._meta.db_table not in tables:
            return False
        described = connection.introspection.get_table_description(cursor, Flow._meta.db_table)
    return {field.column for field in Flow._meta.concrete_fields} <= {each.name for each in described}
