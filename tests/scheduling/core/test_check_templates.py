"""`manage.py check_templates`: which stored texts must change."""

from io import StringIO

import pytest
from django.core.management import CommandError, call_command

from scheduling.models import TemplateText, Touch
from tests.scheduling.core.conftest import deliver_when_due

pytestmark = pytest.mark.django_db(transaction=True)


def check(*words):
    """Exit status and output."""
    out = StringIO()
    try:
        call_command("check_templates", *words, stdout=out)
    except CommandError as error:
        return error.returncode, out.getvalue().splitlines()
    return 0, out.getvalue().splitlines()


def test_check_templates_lists_refused_texts(matrix):
    matrix.template("loops", body="{% for a in event.data.x %}{% for b in a %}{{ b }}{% endfor %}{% endfor %}")
    matrix.template("sound", body="{{ event.data.x }}")
    matrix.template("upper", body="hi\n{{ user.name|default('x') }}")
    matrix.template("words", body="hi")
    TemplateText.objects.filter(template__key="words").update(locale="in words")
    status, lines = check()
    assert status == 1
    assert lines == [
        "loops [zh-hans] body: line 1: a loop must not contain another loop",
        "upper [zh-hans] body: line 2: “user.name|default('x')” cannot be read; write filters like x|default:\"-\"",
        "words [in words] locale: must be a language of at most 20 characters, like zh-hans or en",
    ]


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ("{{ event.data.lines }}", "does not render any more (“event.data.lines” is a list"),
        ("{% if event.data.note %}{% endif %}", "does not render any more (“event.data.note” is null)"),
    ],
)
def test_check_templates_lists_texts_that_fail(shop, body, said):
    template = shop.template("guide", body="hi")
    shop.node(template=template)
    (row,) = deliver_when_due(*shop.record_event(data={"lines": [1], "note": None}).task_ids)
    template.texts.update(body=body)  # as an earlier version stored and sent it
    status, lines = check()
    assert (status, len(lines)) == (1, 1)
    assert lines[0].startswith(f"guide {said}")
    assert str(row.task_id) in lines[0]
    assert check("--samples", "0") == (0, ["1 templates are in order"])
    Touch.objects.update(template_version=0)
    assert check()[0] == 0  # sent with an earlier version of the template
