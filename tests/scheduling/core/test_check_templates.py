"""`manage.py check_templates`: what the bounded template language changes for the texts that are stored."""

from __future__ import annotations

from io import StringIO

import pytest
from django.core.management import CommandError, call_command

from scheduling.models import Touch
from tests.scheduling.core.conftest import deliver_when_due
from tests.support.matrix import MatrixBuilder, RecordEvent

pytestmark = pytest.mark.django_db


def check(*words: str) -> tuple[int, list[str]]:
    """Exit status and output."""
    out = StringIO()
    try:
        call_command("check_templates", *words, stdout=out)
    except CommandError as error:
        return error.returncode, out.getvalue().splitlines()
    return 0, out.getvalue().splitlines()


def test_check_templates_without_fault_exits_0(matrix: MatrixBuilder, record_event: RecordEvent) -> None:
    matrix.node(template=matrix.template("guide", body="hi {{ user.name }}"))
    deliver_when_due(*record_event().task_ids)
    assert check() == (0, ["1 templates are in order"])


def test_check_templates_lists_compile_errors(matrix: MatrixBuilder) -> None:
    matrix.template("loops", body="{% for a in event.data.x %}{% for b in a %}{{ b }}{% endfor %}{% endfor %}")
    matrix.template("sound", body="{{ event.data.x }}")
    matrix.template("upper", body="hi\n{{ user.name.upper() }}")
    status, lines = check()
    assert status == 1
    assert [line.split(": line")[0] for line in lines] == ["loops [zh-hans] body", "upper [zh-hans] body"]
    assert "line 1: a loop must not contain another loop" in lines[0]
    assert "line 2: only event.time.strftime" in lines[1]


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ("{{ event.data.paid }}", "renders differently"),
        ("{{ event.data.lines }}", "does not render any more (“event.data.lines” is a list"),
        ("{{ event.data.note }}", "does not render any more (“event.data.note” is null)"),
    ],
)
def test_check_templates_lists_changed_renderings(
    matrix: MatrixBuilder, record_event: RecordEvent, body: str, said: str
) -> None:
    template = matrix.template("guide", body="hi")
    matrix.node(template=template)
    (row,) = deliver_when_due(*record_event(data={"paid": True, "lines": [1], "note": None}).task_ids)
    template.texts.update(body=body)  # as an earlier version stored and sent it
    status, lines = check()
    assert (status, len(lines)) == (1, 1)
    assert lines[0].startswith(f"guide {said}")
    assert str(row.task_id) in lines[0]
    assert check("--samples", "0") == (0, ["1 templates are in order"])


def test_check_templates_skips_earlier_versions(matrix: MatrixBuilder, record_event: RecordEvent) -> None:
    template = matrix.template("guide", body="{{ event.data.paid }}")
    matrix.node(template=template)
    deliver_when_due(*record_event(data={"paid": True}).task_ids)
    assert check()[0] == 1
    Touch.objects.update(template_version=0)
    assert check()[0] == 0
