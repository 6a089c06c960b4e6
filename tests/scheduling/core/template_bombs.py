"""Texts that ask for far too much work or memory. As a program: render each in a process of its own and measure it."""

from __future__ import annotations

import json
import os
import resource
import sys
from datetime import UTC, datetime
from time import process_time
from typing import Any

import django
from django.conf import settings

from scheduling.templating import CannotRender, Run, Text

LOOP = "{% for a in event.data.rows %}BODY{% endfor %}"


def often(body: str) -> str:
    """A loop that repeats `body` as often as a text can have it."""
    return LOOP.replace("BODY", body * min(490 // (body.count("{{") + body.count("{%")), 32_000 // len(body)))


#: By what they try.
BOMBS = {
    "long number": "{{ " + "9" * 5_000 + " }}",
    "long number in a filter": "{{ user.id|truncatechars:" + "9" * 400 + " }}",
    "huge data": "{{ event.data.huge }}",
    "huge float": "{{ event.data.float|floatformat:90 }}",
    "huge number as text": "{{ event.data.exponent|floatformat:2 }}",
    "tiny number as text": "{{ event.data.tiny|floatformat:2 }}",
    "digits of floatformat": "{{ 5|floatformat:1000000000 }}",
    "nested ifs": "{% if 1 %}" * 240 + "{% endif %}" * 240,
    "nots": "{% if " + "not " * 120 + "1 %}{% endif %}",
    "long not": "{% if " + "not " * 8_000 + "1 %}{% endif %}",
    "chain of ors": "{% if 0" + " or 0" * 95 + " %}{% endif %}",
    "chain of filters": "{{ user.name" + "|upper" * 1_900 + " }}",
    "long path": "{{ event.data" + ".a" * 1_900 + "|upper }}",
    "spaces": "{{ user.name" + " " * 32_000 + "x }}",
    "quotes": "{{ '" + "a'" * 16_000,
    "quotes in an if": "{% if " + "'a" * 240 + " %}{% endif %}",
    "escapes": "{{ '" + "\\" * 32_001,
    "tags": "{{ user.id }}" * 2_500,
    "unclosed blocks": "{{ " * 10_000,
    "unclosed comments": "{#" * 16_000,
    "closed once": "{{" * 16_000 + "}}",
    "verbatims": "{% verbatim %}" * 490,
    "length of the text": "x" * 1_000_000,
    "loop in loop": LOOP.replace("BODY", LOOP),
    "loop over much": "{% for a in event.data.list %}{% endfor %}",
    "loop over loops": "{% for a in event.data.fifty %}{% for b in event.data.fifty %}{% endfor %}{% endfor %}",
    "many loops": "{% for a in event.data.fifty %}{{ event.data.short }}{% endfor %}" * 160,
    "range": "{% for a in range(100000000) %}x{% endfor %}",
    "includes": "{% include 'a' %}",
    "date of settings": "{{ event.time|date:'" + "r" * 400 + "' }}",
    "deep data": "{{ event.data.deep|join:',' }}",
    "deep data compared": "{% if event.data.deep == event.data.deep %}{% endif %}",
    "growing urlencode": "{{ event.data.chinese" + "|urlencode" * 40 + " }}",
    "join of much": "{{ event.data.list|join:event.data.text }}",
    "join of many": "{{ event.data.list|join:'" + "a" * 99 + "' }}",
    **{
        f"loop of {name}": often(body) for name, body in {
            "large texts": "{{ event.data.text }}", "printed texts": "{{ event.data.half }}",
            "upper": "{{ event.data.half|upper|length }}", "title": "{{ event.data.words|title|length }}",
            "urlencode": "{{ event.data.chinese|urlencode|length }}", "truncatechars":
            "{{ event.data.half|truncatechars:9 }}", "in": "{% if event.data.needle in event.data.half %}{% endif %}",
            "in a list": "{% if 'a' in event.data.list %}{% endif %}",
            "equal": "{% if event.data.half == event.data.copy %}{% endif %}",
            "dates": "{{ event.time|date:'" + "r" * 100 + "' }}", "numbers": "{{ event.data.digits|floatformat:2 }}",
            "join": "{{ event.data.list|join:''|length }}", "defaults": "{{ event.data.x|default:event.data.half }}",
            "conditions": "{% if " + "0 or " * 40 + "0 %}{% endif %}",
        }.items()
    },
}  # fmt: skip


def names() -> dict[str, Any]:
    """What a text may name, with event data beyond any that is accepted."""
    deep: list[Any] = []
    for _ in range(50_000):
        deep = [deep]
    fifty = list(range(50))
    data = {
        "list": list(range(60_000)), "rows": fifty, "fifty": fifty, "text": "a" * 244_000, "half": "a" * 60_000,
        "copy": "a" * 59_999 + "b", "chinese": "字" * 7_000, "words": "a " * 32_000, "huge": 10**4_000, "float": 1e308,
        "exponent": "1e999999", "tiny": "1e-999999", "deep": deep, "needle": "a" * 1_000 + "b", "digits": "9" * 90,
        "short": "a" * 1_000,
    }  # fmt: skip
    return {
        "user": {"id": "u1", "name": "Ann", "level": "vip", "locale": "en", "timezone": ""},
        "event": {"id": "1", "source": "shop", "type": "order.paid", "time": datetime.now(UTC), "data": data},
        "chat": {"id": "c1"},
    }


def measure(source: str, known: dict[str, Any]) -> dict[str, Any]:
    """In a fork: the error, seconds of processor time and bytes of resident memory above those before."""
    reader, writer = os.pipe()
    pid = os.fork()
    if not pid:
        before, began = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, process_time()
        try:
            Text(source).render(Run(known))
            ended = ""
        except CannotRender as error:
            ended = f"{type(error).__name__}: {error}"
        except BaseException as error:
            ended = f"unexpected {type(error).__name__}: {error}"
        seconds, after = process_time() - began, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        os.write(
            writer, json.dumps({"ended": ended[:200], "seconds": seconds, "bytes": (after - before) * 1024}).encode()
        )
        os._exit(0)
    os.close(writer)
    with os.fdopen(reader, "rb") as answers:
        answer = answers.read()
    os.waitpid(pid, 0)
    return json.loads(answer)


if __name__ == "__main__":
    settings.configure(USE_TZ=True, TIME_ZONE="UTC", LANGUAGE_CODE="en")
    django.setup()
    given = names()
    first = "{{ user.id|truncatechars:1 }}{{ event.time|date:'r' }}"
    Text(first).render(Run(names()))  # what is imported and allocated once is not counted
    json.dump({name: measure(source, given) for name, source in BOMBS.items()}, sys.stdout)
